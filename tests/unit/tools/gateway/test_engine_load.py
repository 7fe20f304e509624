"""The load of engines by the names of their metrics."""

from __future__ import annotations

import pytest

from tools.gateway.engine_load import ScrapedLoad, engine_load_in

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:cache_config_info{block_size="32",num_gpu_blocks="4096",cache_dtype="auto",engine="0"} 1.0
vllm:inter_token_latency_seconds_sum{engine="0",model_name="m"} 12.0
vllm:inter_token_latency_seconds_count{engine="0",model_name="m"} 400.0
vllm:inter_token_latency_seconds_bucket{engine="0",le="0.01",model_name="m"} 10.0
vllm:num_requests_waiting_by_reason{reason="kv"} nonsense"
"""
SGLANG = """\
sglang:num_running_reqs{model_name="m"} 5.0
sglang:num_queue_reqs{model_name="m"} 1.0
sglang:token_usage{model_name="m"} 0.75
sglang:cache_config_info{page_size="64",num_pages="900"} 1.0
"""
TRTLLM = """\
trtllm_num_requests_running 6.0
trtllm_num_requests_waiting 0.0
trtllm_kv_cache_utilization 0.125
trtllm_kv_cache_tokens_per_block 64.0
trtllm_kv_cache_max_blocks 800.0
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            VLLM.replace('vllm:num_requests_waiting_by_reason{reason="kv"} nonsense"\n', ""),
            ScrapedLoad(7, 2, 0.5, 32, 4096, 12.0, 400.0),
        ),
        (SGLANG, ScrapedLoad(5, 1, 0.75, 64, 900)),
        (TRTLLM, ScrapedLoad(6, 0, 0.125, 64, 800)),
        ("vllm:num_requests_running 0\n", ScrapedLoad()),
    ],
)
def test_each_engine_is_understood(text: str, expected: ScrapedLoad) -> None:
    """Ranks of one engine are summed; the fullest cache counts."""
    assert engine_load_in(text) == expected


@pytest.mark.parametrize("text", ["", "python_gc_objects 1\n", VLLM, "vllm:num_requests_running x\n"])
def test_what_is_no_engine_is_a_value_error(text: str) -> None:
    """Another process may listen at the address; a line that cannot be read makes the rest doubtful."""
    with pytest.raises(ValueError):
        engine_load_in(text)


def test_the_time_between_tokens_is_that_since_the_last_reading() -> None:
    """The histogram counts from the start of the engine."""
    before, now = ScrapedLoad(itl_seconds_sum=10.0, itl_count=100.0), ScrapedLoad(itl_seconds_sum=12.0, itl_count=180.0)
    assert now.mean_itl_seconds(before) == pytest.approx(0.025)
    assert (now.mean_itl_seconds(None), now.mean_itl_seconds(now)) == (0.0, 0.0)
