"""kvloom.toml as arguments of LLM: what the version lacks, and what must never be left at the library's default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvloom_common.config import (
    ShardConfig,
    TensorRtCacheTransceiverConfig,
    TensorRtKvCacheConfig,
    TensorRtKvConnectorConfig,
    TensorRtLlmConfig,
    TensorRtLoraConfig,
    TensorRtSpeculationConfig,
)
from shard_server.engines.base import EngineError
from shard_server.engines.tensorrt_llm.api import load_tensorrt_llm
from shard_server.engines.tensorrt_llm.llm_options import llm_options
from shard_server.engines.tensorrt_llm.versions import NEWEST, RELEASE_1_2, Release
from tests.fakes.fake_tensorrt_llm import Variant, installed_tensorrt_llm


def options_of(config: TensorRtLlmConfig | None = None, variant: Variant | None = None, **shard: Any) -> dict[str, Any]:
    with installed_tensorrt_llm(variant):
        shard_config = ShardConfig(engine="tensorrt_llm", tensorrt_llm=config or TensorRtLlmConfig(), **shard)
        return llm_options(load_tensorrt_llm(), Path("/models/llama"), shard_config, 4096)


def test_the_defaults_are_what_the_adapter_relies_on():
    """Events, statistics, no tokenizer, the backend without the cancel crash."""
    options = options_of(block_size=32)
    assert options["model"] == "/models/llama"
    assert options["skip_tokenizer_init"] is True
    assert options["enable_iter_perf_stats"] is True
    assert options["backend"] == "pytorch"
    assert options["max_batch_size"] == 64
    assert options["max_seq_len"] == 4096
    cache = options["kv_cache_config"]
    assert cache.event_buffer_max_size > 0, "0 would mean no events"
    assert (cache.tokens_per_block, cache.max_tokens) == (32, None)
    for absent in ("speculative_config", "guided_decoding_backend", "enable_lora", "cache_transceiver_config"):
        assert absent not in options


def test_blocks_become_tokens():
    """The library counts its cache in tokens."""
    assert options_of(num_blocks=10, block_size=32)["kv_cache_config"].max_tokens == 320


def test_no_pool_of_ngrams_is_shared_between_tenants():
    """The library's default is one for all."""
    options = options_of(TensorRtLlmConfig(speculation=TensorRtSpeculationConfig(method="ngram", max_draft_len=6)))
    speculation = options["speculative_config"]
    assert speculation.is_public_pool is False
    assert speculation.max_draft_len == 6
    assert options["disable_overlap_scheduler"] is True


@pytest.mark.parametrize(
    ("release", "class_name", "field"),
    [
        (RELEASE_1_2, "EagleDecodingConfig", "speculative_model_dir"),
        (NEWEST, "Eagle3DecodingConfig", "speculative_model"),
    ],
)
def test_eagle_is_named_as_the_version_names_it(release: Release, class_name: str, field: str):
    """Newer versions renamed the class and the field."""
    config = TensorRtLlmConfig(speculation=TensorRtSpeculationConfig(method="eagle3", draft_model="/models/eagle"))
    speculation = options_of(config, Variant(release=release))["speculative_config"]
    assert type(speculation).__name__ == class_name
    assert getattr(speculation, field) == "/models/eagle"


@pytest.mark.parametrize("method", ["eagle3", "mtp", "draft_target"])
def test_speculation_must_not_make_sampled_answers_greedy(method: str):
    """In 1.2.1 a flag allows sampling; in newer versions it has no effect, and a warning in the log for every start."""
    config = TensorRtLlmConfig(speculation=TensorRtSpeculationConfig(method=method, draft_model="/models/draft"))
    assert options_of(config)["speculative_config"].allow_advanced_sampling is True
    assert options_of(config, Variant(release=NEWEST))["speculative_config"].allow_advanced_sampling is False


def test_other_speculation():
    """MTP needs no draft model, a draft model needs its path. The newest versions know the number of layers."""
    config = TensorRtLlmConfig(speculation=TensorRtSpeculationConfig(method="mtp", max_draft_len=2))
    assert options_of(config)["speculative_config"].num_nextn_predict_layers == 2
    newest = options_of(config, Variant(release=NEWEST))["speculative_config"]
    assert (newest.max_draft_len, newest.num_nextn_predict_layers) == (2, 1)
    with pytest.raises(EngineError, match=r"speculation\.draft_model"):
        options_of(TensorRtLlmConfig(speculation=TensorRtSpeculationConfig(method="draft_target")))


def test_parallelism_adapters_guides_graphs_and_transceiver():
    """Each under the library's name."""
    options = options_of(
        TensorRtLlmConfig(
            tensor_parallel_size=4,
            pipeline_parallel_size=2,
            chunked_prefill=False,
            cuda_graphs=False,
            guided_decoding_backend="llguidance",
            kv_cache=TensorRtKvCacheConfig(host_cache_bytes=2**30, dtype="fp8", free_gpu_memory_fraction=0.5),
            lora=TensorRtLoraConfig(enabled=True, max_rank=8, target_modules=["attn_q"]),
            cache_transceiver=TensorRtCacheTransceiverConfig(backend="NIXL"),
        )
    )
    assert (options["tensor_parallel_size"], options["pipeline_parallel_size"]) == (4, 2)
    assert options["enable_chunked_prefill"] is False
    assert options["cuda_graph_config"] is None
    assert options["guided_decoding_backend"] == "llguidance"
    assert options["skip_tokenizer_init"] is False, "guides are compiled against the vocabulary"
    cache = options["kv_cache_config"]
    assert (cache.host_cache_size, cache.dtype, cache.free_gpu_memory_fraction) == (2**30, "fp8", 0.5)
    assert options["enable_lora"] is True
    assert options["lora_config"].max_lora_rank == 8
    assert options["lora_config"].lora_target_modules == ["attn_q"]
    transceiver = options["cache_transceiver_config"]
    assert (transceiver.backend, transceiver.kv_transfer_timeout_ms) == ("NIXL", 60_000)


def test_an_option_that_was_set_and_that_the_version_lacks_is_an_error_that_names_it():
    """Dropping it silently would serve something else than was configured."""
    variant = Variant(without_llm_arguments=("stream_interval", "sampler_type"))
    assert "stream_interval" not in options_of(variant=variant)
    with pytest.raises(EngineError, match=r"shard\.tensorrt_llm\.stream_interval.*1\.2\.1"):
        options_of(TensorRtLlmConfig(stream_interval=4), variant)


def test_another_order_of_the_queue_is_not_to_be_had():
    """It is the library that admits."""
    with pytest.raises(EngineError, match=r"shard\.queue_order"):
        options_of(queue_order="shortest_prefill")


def test_further_arguments_are_checked_too():
    """The constructor's own message comes after minutes, and from another process."""
    assert (
        options_of(TensorRtLlmConfig(extra_llm_options={"num_postprocess_workers": 1}))["num_postprocess_workers"] == 1
    )
    with pytest.raises(EngineError, match=r"extra_llm_options.*no_such_thing"):
        options_of(TensorRtLlmConfig(extra_llm_options={"no_such_thing": 1}))
    with pytest.raises(EngineError, match="max_seq_len is set by kvloom"):
        options_of(TensorRtLlmConfig(extra_llm_options={"max_seq_len": 1}))


def test_the_index_stub_is_recognised():
    """`pip install tensorrt-llm` gives it where there is no NVIDIA driver."""
    with installed_tensorrt_llm(Variant(is_stub=True)), pytest.raises(EngineError, match="stub"):
        load_tensorrt_llm()


def test_a_missing_library_is_an_engine_error():
    """The shard says so in one line and stays out of the fleet."""
    with pytest.raises(EngineError, match="cannot be imported"):
        load_tensorrt_llm()


def test_adapters_need_modules_or_one_to_take_them_from():
    """Without either the library's executor dies of an assertion, long after the start has begun."""
    with pytest.raises(EngineError, match="target_modules"):
        options_of(TensorRtLlmConfig(lora=TensorRtLoraConfig(enabled=True)))
    options = options_of(TensorRtLlmConfig(lora=TensorRtLoraConfig(enabled=True, adapters={"b": "/b", "a": "/a"})))
    assert options["lora_config"].lora_dir == ["/a"]


def test_parallelism_connectors_and_tiers_are_passed_on():
    """What is not set is left to the library."""
    assert not {"moe_expert_parallel_size", "gpus_per_node", "kv_connector_config"} & options_of().keys()
    connector = TensorRtKvConnectorConfig(module="kvbm.connector", scheduler_class="Leader", worker_class="Worker")
    config = TensorRtLlmConfig(
        moe_expert_parallel_size=4,
        moe_tensor_parallel_size=2,
        gpus_per_node=8,
        kv_connector=connector,
        kv_cache=TensorRtKvCacheConfig(host_cache_bytes=1, secondary_offload_min_priority=30),
    )
    options = options_of(config)
    assert [options[f"moe_{kind}_parallel_size"] for kind in ("expert", "tensor")] == [4, 2]
    assert options["gpus_per_node"] == 8
    assert options["kv_connector_config"].connector_worker_class == "Worker"
    assert options["kv_cache_config"].secondary_offload_min_priority == 30


@pytest.mark.parametrize(
    ("config", "option"),
    [
        (TensorRtLlmConfig(kv_cache=TensorRtKvCacheConfig(disk_cache_bytes=1)), "kv_cache: .*disk_cache_size"),
        (TensorRtLlmConfig(kv_connector=TensorRtKvConnectorConfig(preset="lmcache")), "kv_connector: .*no connector"),
    ],
)
def test_what_only_newer_versions_have_is_refused_by_name(config: TensorRtLlmConfig, option: str):
    """1.2.1's constructors would only say that an extra field is not permitted."""
    with pytest.raises(EngineError, match=option):
        options_of(config)


@pytest.mark.parametrize("option", ["moe_expert_parallel_size", "gpus_per_node"])
def test_an_argument_that_the_version_lacks_is_refused_by_name(option: str):
    """The operator set it for a reason."""
    with pytest.raises(EngineError, match=f"shard.tensorrt_llm.{option}"):
        options_of(TensorRtLlmConfig(**{option: 2}), Variant(without_llm_arguments=[option]))


def test_kv_events_are_never_pushed_as_well():
    """The library's getter then returns nothing, and the shard would see an empty cache."""
    options = options_of(variant=Variant(release=NEWEST))
    assert options["kv_cache_config"].kv_events_config is None
    with pytest.raises(EngineError, match="kv_cache_config is set by kvloom"):
        options_of(TensorRtLlmConfig(extra_llm_options={"kv_cache_config": {"kv_events_config": {}}}))


def test_half_a_connector_is_refused():
    """The library would fail minutes later, in a worker."""
    with pytest.raises(msgspec.ValidationError, match="module, scheduler_class and worker_class together"):
        msgspec.convert({"module": "m"}, TensorRtKvConnectorConfig)


@pytest.mark.parametrize(("release", "is_known"), [(RELEASE_1_2, False), (NEWEST, True)])
def test_the_priority_queue_is_an_option_of_newer_versions(release: Release, is_known: bool):
    """1.2.1 would refuse an argument that the operator has never heard of."""
    config = TensorRtLlmConfig(waiting_queue_policy="priority")
    if is_known:
        assert options_of(config, Variant(release=release))["scheduler_config"].waiting_queue_policy == "priority"
        assert "scheduler_config" not in options_of(None, Variant(release=release))
    else:
        with pytest.raises(EngineError, match=r"shard\.tensorrt_llm\.waiting_queue_policy.*waiting_queue_policy"):
            options_of(config, Variant(release=release))


@pytest.mark.parametrize("backend", ["DEFAULT", "UCX", "NIXL", "MPI", "MOONCAKE"])
@pytest.mark.parametrize("release", [RELEASE_1_2, NEWEST], ids=["1.2.1", "newest"])
def test_a_transceiver_is_one_that_the_version_has(release: Release, backend: Any):
    """The library would find out after it has loaded the weights."""
    config = TensorRtLlmConfig(cache_transceiver=TensorRtCacheTransceiverConfig(backend=backend))
    if backend == "MOONCAKE" and release is RELEASE_1_2:
        with pytest.raises(EngineError, match=r"shard\.tensorrt_llm\.cache_transceiver\.backend.*MOONCAKE"):
            options_of(config, Variant(release=release))
    else:
        assert options_of(config, Variant(release=release))["cache_transceiver_config"].backend == backend


@pytest.mark.parametrize("method", ["off", "ngram", "eagle3", "mtp", "draft_target"])
@pytest.mark.parametrize("release", [RELEASE_1_2, NEWEST], ids=["1.2.1", "newest"])
def test_the_overlap_scheduler_is_off_only_where_drafts_need_it(release: Release, method: Any):
    """Off costs speed; on, n-grams have nothing to draft from. The newest draft_target is part of the model."""
    speculation = TensorRtSpeculationConfig(method=method, draft_model="draft")
    options = options_of(TensorRtLlmConfig(speculation=speculation), Variant(release=release))
    is_off = method == "ngram" or (method == "draft_target" and release is RELEASE_1_2)
    assert options.get("disable_overlap_scheduler", False) is is_off


@pytest.mark.parametrize(
    ("changes", "key"), [({"sampler_type": "TRTLLMSampler"}, "sampler_type"), ({"pipeline_parallel_size": 2}, "method")]
)
def test_what_excludes_speculation_is_refused_by_name(changes: dict[str, Any], key: str):
    """The library says so minutes later, or samples otherwise."""
    config = TensorRtLlmConfig(speculation=TensorRtSpeculationConfig(method="ngram"), **changes)
    with pytest.raises(EngineError, match=rf"shard\.tensorrt_llm\..*{key}"):
        options_of(config)
