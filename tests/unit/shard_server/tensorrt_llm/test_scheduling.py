"""What TensorRT-LLM learns of a request besides its tokens and its sampling, and from which version on."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvloom_common.config import TensorRtLlmConfig
from kvloom_common.text.block_hash import block_hashes, token_bytes
from shard_server.engines.base import EngineError
from shard_server.engines.tensorrt_llm.kv_cache.kv_events import KvEventTranslator
from shard_server.engines.tensorrt_llm.kv_cache.kv_records import KvRecord, StoredBlock, parse_events
from shard_server.engines.tensorrt_llm.kv_cache.kv_roots import RootLedger
from tests.conformance.engine_driver import prompt_of, request_of
from tests.fakes.fake_tensorrt_llm import IN_1_2, IN_NEWEST, Variant
from tests.fakes.tensorrt_llm_engine import options, running_tensorrt_llm

BOTH = pytest.mark.parametrize("variant", [IN_1_2, IN_NEWEST], ids=["1.2.1", "newest"])
BLOCK_SIZE = 4
ROOT = 5


async def passed(variant: Variant, config: TensorRtLlmConfig, **changes: Any) -> dict[str, Any]:
    """What generate_async gets for a request."""
    async with running_tensorrt_llm(variant, config) as (driver, fake):
        driver.engine.submit(dataclasses.replace(request_of("a", prompt_of(1, 40), 2), **changes))
        return fake.llm.submitted[-1][2]


@BOTH
async def test_by_default_a_request_is_passed_as_it_always_was(variant: Variant):
    """What is off must not change which request TensorRT-LLM prefers, nor what it keeps."""
    found = await passed(variant, TensorRtLlmConfig(), class_rank=9)
    assert found["priority"] == 0.5
    assert [found[name] for name in ("kv_cache_retention_config", "scheduling_params", "trace_headers")] == [None] * 3


async def test_the_more_urgent_class_leaves_the_queue_first():
    """Batch jobs must not delay a chat, and a chat without a class has the library's own default."""
    config = options(scheduler_config={"waiting_queue_policy": "priority"})
    found = [(await passed(IN_NEWEST, config, class_rank=rank))["priority"] for rank in (0, 1, 2, 50)]
    assert found[:2] == [1.0, 0.5]
    assert found == sorted(found, reverse=True)
    assert 0 < found[3] < found[2]


async def test_a_version_without_priorities_is_refused_by_the_options_name():
    """Otherwise all classes would silently wait alike."""
    with pytest.raises(EngineError, match=r"options\.scheduler_config: .*waiting_queue_policy"):
        await passed(IN_1_2, options(scheduler_config={"waiting_queue_policy": "priority"}))


@BOTH
async def test_blocks_of_what_can_wait_are_evicted_first(variant: Variant):
    """A long batch job would otherwise push the system prompts of all chats out of the cache."""
    config = TensorRtLlmConfig(retention_by_class=True)
    assert (await passed(variant, config))["kv_cache_retention_config"] is None
    retention = (await passed(variant, config, class_rank=3))["kv_cache_retention_config"]
    [prompt] = retention.token_range_retention_configs
    assert (prompt.token_start, prompt.token_end) == (0, None)
    assert 0 <= prompt.priority == retention.decode_retention_priority < 35


@BOTH
async def test_a_trace_continues_inside_the_engine(variant: Variant):
    """The library wants a mapping of headers."""
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    found = await passed(variant, TensorRtLlmConfig(), traceparent=traceparent)
    assert found["trace_headers"] == {"traceparent": traceparent}


async def test_a_request_runs_on_the_rank_that_has_its_prefix():
    """Each rank has a cache of its own: elsewhere the prompt would be computed again."""
    config = TensorRtLlmConfig(
        options={"enable_attention_dp": True, "tensor_parallel_size": 2}, attention_dp_follows_prefix=True
    )
    async with running_tensorrt_llm(IN_NEWEST, config, block_size=8) as (driver, fake):
        prompt = prompt_of(1, 40)
        driver.engine.submit(request_of("a", prompt, 2))
        await driver.step_until(lambda: "a" in driver.ends and bool(driver.kv_events))
        driver.engine.submit(request_of("b", prompt, 2))
        driver.engine.submit(request_of("c", prompt_of(9, 40), 2))
        first, second, third = [extra["scheduling_params"] for _, _, extra in fake.llm.submitted[-3:]]
    assert (second.attention_dp_rank, second.attention_dp_relax) == (IN_NEWEST.rank, True)
    assert (first, third) == (None, None)


async def test_ranks_need_attention_data_parallelism():
    """Without it there is one cache, and the option would do nothing."""
    with pytest.raises(EngineError, match="attention_dp_follows_prefix"):
        await passed(IN_1_2, TensorRtLlmConfig(attention_dp_follows_prefix=True))


def test_the_rank_with_the_longest_prefix_is_found_and_forgotten():
    """A rank that has evicted the blocks is as good as any other."""
    roots = RootLedger(BLOCK_SIZE, 100)
    token_ids = list(range(12))
    roots.remember(token_ids, ROOT)
    events = KvEventTranslator(BLOCK_SIZE, 100, roots)

    def stored(event_id: int, rank: int, num_blocks: int) -> KvRecord:
        chunks = [token_ids[start : start + BLOCK_SIZE] for start in range(0, num_blocks * BLOCK_SIZE, BLOCK_SIZE)]
        blocks = [StoredBlock(f"{index}", BLOCK_SIZE, token_bytes(chunk)) for index, chunk in enumerate(chunks)]
        return KvRecord(event_id, rank, None, "stored", None, blocks)

    assert len(block_hashes(token_ids, BLOCK_SIZE, ROOT)) == 3
    events.translate([stored(0, 0, 1), stored(0, 3, 2)])
    assert events.rank_of(token_ids, ROOT) == 3
    assert events.rank_of(token_ids, ROOT + 1) is None
    events.translate([KvRecord(1, 3, None, "removed", identities=["1", "0"])])
    assert events.rank_of(token_ids, ROOT) == 0
    events.translate([KvRecord(1, 0, None, "removed", identities=["0"])])
    assert events.rank_of(token_ids, ROOT) is None


@pytest.mark.parametrize("token", [{"token_id": "img", "token_extra_id": 0}, {"token_id": 7, "token_extra_id": 3}])
@pytest.mark.parametrize("mm_keys", [[], [{"type": "mm_key", "hash": "ab", "start_offset": 0}]])
def test_blocks_of_images_are_skipped(token: dict[str, Any], mm_keys: list[dict[str, Any]]):
    """The fabric has no multimodal requests: such a block's tokens do not identify it."""
    block = {"block_hash": 1, "tokens": [token] * BLOCK_SIZE, "mm_keys": mm_keys}
    event = {"event_id": 0, "window_size": 64, "data": {"type": "stored", "parent_hash": None, "blocks": [block]}}
    translator = KvEventTranslator(BLOCK_SIZE, 100, RootLedger(BLOCK_SIZE, 100))
    assert translator.translate(parse_events([event])) == []
