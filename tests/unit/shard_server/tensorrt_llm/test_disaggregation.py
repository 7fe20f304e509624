"""Prefill on one TensorRT-LLM engine and decode on another, with the adapter and the fake on both sides."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator

import pytest

from shard_server.engines.base import Capability, EngineError, EngineRequest, Sampling, SequenceFinishReason
from shard_server.engines.tensorrt_llm.disaggregation import Handoff
from shard_server.engines.tensorrt_llm.health import WatchSettings
from tests.conformance.engine_driver import EngineDriver, prompt_of, request_of
from tests.fakes.fake_tensorrt_llm import NEWEST, FakeTensorRtLlm, Variant, installed_tensorrt_llm
from tests.fakes.fake_tensorrt_llm.llm import FakeLlm
from tests.fakes.tensorrt_llm_engine import make_tensorrt_llm_engine

TIMEOUT_SECONDS = 10.0
PROMPT = prompt_of(1, 200)


@contextlib.asynccontextmanager
async def two_engines(
    variant: Variant | None = None, timeout_ms: int = 60_000, cancel_timeout_seconds: float = 10.0
) -> AsyncIterator[tuple[EngineDriver, EngineDriver, FakeTensorRtLlm]]:
    """One that prefills, which is the fake's first LLM, and one that decodes."""
    transceiver = {"backend": "NIXL", "kv_transfer_timeout_ms": timeout_ms}
    with installed_tensorrt_llm(variant) as fake:
        config = WatchSettings(
            options={"cache_transceiver_config": transceiver}, cancel_timeout_seconds=cancel_timeout_seconds
        )
        engines = [make_tensorrt_llm_engine(config, role=role) for role in ("prefill", "decode")]
        try:
            for engine in engines:
                await engine.start()
            yield EngineDriver(engines[0]), EngineDriver(engines[1]), fake
        finally:
            for engine in engines:
                await engine.close()


async def prefill(driver: EngineDriver, request: EngineRequest) -> bytes:
    await driver.run(dataclasses.replace(request, max_tokens=1, prefill_only=True))
    assert driver.ends[request.request_id] is SequenceFinishReason.LENGTH
    return driver.handoffs[request.request_id]


async def until_released(llm: FakeLlm) -> None:
    assert await asyncio.to_thread(llm.executor.wait_until_released, TIMEOUT_SECONDS)


@pytest.mark.parametrize("variant", [Variant(), Variant(release=NEWEST)], ids=["1.2.1", "newest"])
async def test_an_answer_is_the_same_with_its_prompt_computed_elsewhere(variant: Variant):
    """Otherwise clients would see where a request was computed."""
    async with two_engines(variant) as (prefills, decodes, fake):
        (whole,) = await decodes.run(request_of("whole", PROMPT, 20))
        handoff = await prefill(prefills, request_of("a", PROMPT, 20))
        (split,) = await decodes.run(request_of("a", PROMPT, 20, handoff=handoff))
        assert split == whole
        assert prefills.tokens["a"] == whole[:1]
        await until_released(fake.llms[0])
        given = fake.llms[0].submitted[-1][1]
        assert given.max_tokens == 1
        fields = Handoff.from_bytes(handoff)
        assert (fields.disagg_request_id is not None) == (fields.ctx_dp_rank is not None) == (variant.release is NEWEST)


async def test_the_first_token_has_its_log_probabilities():
    """The engine that answers has not computed them: they come with the hand-off."""
    sampling = Sampling(seed=7, num_logprobs=2)
    async with two_engines(Variant(release=NEWEST)) as (prefills, decodes, _):
        await decodes.run(request_of("whole", PROMPT, 20, sampling=sampling))
        handoff = await prefill(prefills, request_of("a", PROMPT, 20, sampling=sampling))
        await decodes.run(request_of("a", PROMPT, 20, sampling=sampling, handoff=handoff))
        assert len(decodes.logprobs["a"]) == 20
        assert decodes.logprobs["a"] == decodes.logprobs["whole"]


async def test_a_version_that_hands_over_no_log_probabilities_refuses_to():
    """The first token would have none, or that of the second one."""
    sampling = Sampling(num_logprobs=2)
    async with two_engines() as (prefills, decodes, _):
        assert Capability.HANDOFF_LOGPROBS not in prefills.engine.info.capabilities
        handoff = await prefill(prefills, request_of("a", PROMPT, 20))
        for request in (
            request_of("b", PROMPT, 1, sampling=sampling, prefill_only=True),
            request_of("c", PROMPT, 20, sampling=sampling, handoff=handoff),
        ):
            with pytest.raises(EngineError, match="without its logprobs"):
                prefills.engine.submit(request)
        (tokens,) = await decodes.run(request_of("d", PROMPT, 20, handoff=handoff))
        assert len(tokens) == 20


async def test_kv_that_is_never_fetched_is_freed_after_the_timeout():
    """The request may have been cancelled, or its router lost, between the two parts."""
    async with two_engines(timeout_ms=150) as (prefills, _, fake):
        await prefill(prefills, request_of("a", PROMPT, 20))
        assert fake.llms[0].num_held_blocks > 0
        await until_released(fake.llms[0])
        assert not fake.llms[0].cache.num_used


@pytest.mark.parametrize("variant", [Variant(), Variant(release=NEWEST)], ids=["1.2.1", "newest"])
async def test_an_abort_of_a_complete_leg_frees_nothing(variant: Variant):
    """The library knows the request no more: that is why hand-offs are collected."""
    async with two_engines(variant, timeout_ms=300) as (prefills, _, fake):
        await prefill(prefills, request_of("a", PROMPT, 20))
        llm = fake.llms[0]
        num_held = llm.num_held_blocks
        llm.outputs[-1].abort()
        await prefills.run(request_of("b", PROMPT[:50], 5))
        assert llm.num_held_blocks == num_held > 0
        await until_released(llm)


@pytest.mark.parametrize("variant", [Variant(), Variant(release=NEWEST)], ids=["1.2.1", "newest"])
async def test_a_leg_that_is_cancelled_when_it_is_complete_ends_with_its_hand_off(variant: Variant):
    """Only with it can its KV be collected, before the timeout frees it."""
    async with two_engines(variant) as (prefills, decodes, fake):
        llm = fake.llms[0]
        request = request_of("a", PROMPT, 1, prefill_only=True)
        prefills.engine.submit(request)
        assert llm.executor.wait_until_held(TIMEOUT_SECONDS)  # and the event loop has not seen its end
        prefills.engine.cancel("a")
        await prefills.step_until(lambda: "a" in prefills.ends)
        assert prefills.ends["a"] is SequenceFinishReason.LENGTH
        assert "a" not in prefills.tokens
        await decodes.run(request_of("a", PROMPT, 1, handoff=prefills.handoffs["a"]))
        await until_released(llm)


@pytest.mark.parametrize("variant", [Variant(), Variant(release=NEWEST)], ids=["1.2.1", "newest"])
async def test_a_leg_that_is_cancelled_before_ends_as_cancelled(variant: Variant):
    """Nothing waits to be fetched. The library drops it without an answer, and a leg that might be running is waited
    for until the timeout."""
    async with two_engines(variant, cancel_timeout_seconds=0.2) as (prefills, _, fake):
        fake.llms[0].executor.hangs = True
        prefills.engine.submit(request_of("a", PROMPT, 1, prefill_only=True))
        prefills.engine.cancel("a")
        fake.llms[0].executor.hangs = False
        await prefills.step_until(lambda: "a" in prefills.ends)
        assert prefills.ends["a"] is SequenceFinishReason.CANCELLED
        assert not prefills.handoffs
        assert not fake.llms[0].num_held_blocks


async def test_a_cancelled_answer_fetches_its_kv_first():
    """Interrupted before, the engine that has the KV would keep it until its timeout."""
    async with two_engines() as (prefills, decodes, fake):
        handoff = await prefill(prefills, request_of("a", PROMPT, 20))
        executor = fake.llms[1].executor
        executor.hangs = True
        decodes.engine.submit(request_of("a", PROMPT, 20, handoff=handoff))
        decodes.engine.cancel("a")
        assert not fake.llms[1].outputs[-1].aborted()
        executor.hangs = False
        await decodes.step_until(lambda: "a" in decodes.ends)
        assert decodes.ends["a"] is SequenceFinishReason.CANCELLED
        assert fake.llms[1].outputs[-1].aborted()
        await until_released(fake.llms[0])
        assert "a" not in decodes.tokens


async def test_a_cancelled_answer_whose_kv_does_not_come_is_cut_off():
    """The engine that has it may be gone."""
    async with two_engines(cancel_timeout_seconds=0.1) as (prefills, decodes, fake):
        handoff = await prefill(prefills, request_of("a", PROMPT, 20))
        fake.llms[1].executor.hangs = True
        decodes.engine.submit(request_of("a", PROMPT, 20, handoff=handoff))
        decodes.engine.cancel("a")
        await decodes.step_until(lambda: "a" in decodes.ends)
        assert decodes.ends["a"] is SequenceFinishReason.CANCELLED
        assert fake.llms[1].outputs[-1].aborted()
        fake.llms[1].executor.hangs = False


async def test_a_hand_off_that_cannot_be_fetched_fails_its_request_only():
    """The engine that prefilled may be gone: the router then has the whole request computed."""
    async with two_engines() as (prefills, decodes, fake):
        handoff = await prefill(prefills, request_of("a", PROMPT, 20))
        fake.llms[0].executor.transfers.close()
        decodes.engine.submit(request_of("a", PROMPT, 20, handoff=handoff))
        await decodes.step_until(lambda: "a" in decodes.ends)
        assert decodes.ends["a"] is SequenceFinishReason.ERROR
        (tokens,) = await decodes.run(request_of("again", PROMPT, 20))
        assert len(tokens) == 20
        with pytest.raises(EngineError, match="hand-off"):
            decodes.engine.submit(request_of("b", PROMPT, 20, handoff=b"\xc1"))


async def test_an_older_version_refuses_a_newer_ones_hand_off():
    """A hand-off with a field that is silently left out might fetch the wrong KV."""
    newer = Handoff(5, b"", [1], ctx_dp_rank=1)
    async with two_engines() as (_, decodes, _fake):
        with pytest.raises(EngineError, match="ctx_dp_rank"):
            decodes.engine.submit(request_of("a", PROMPT, 20, handoff=newer.to_bytes()))


async def test_a_first_token_that_ends_the_answer_leaves_nothing_to_hand_over():
    """The request is complete, so no engine would fetch its KV."""
    async with two_engines() as (prefills, _, _fake):
        (first,) = await prefills.run(request_of("a", PROMPT, 1))
        request = request_of("b", PROMPT, 20, stop_token_ids=frozenset(first))
        await prefills.run(dataclasses.replace(request, max_tokens=1, prefill_only=True))
        assert prefills.ends["b"] is SequenceFinishReason.STOP
        assert not prefills.handoffs


async def test_only_an_engine_with_a_transceiver_hands_over():
    """Without one, the library would keep the KV, and never send it."""
    with installed_tensorrt_llm():
        engine = make_tensorrt_llm_engine()
        try:
            await engine.start()
            assert Capability.KV_HANDOFF not in engine.info.capabilities
        finally:
            await engine.close()


def test_hand_offs_keep_all_fields():
    """They cross three processes as bytes."""
    full = Handoff(1, b"\x00\xff", [2], [3, 4], 5, 6, "tcp://10.0.0.1:5", 1, [{2: (-0.5, 1), 9: (-3.0, None)}])
    assert Handoff.from_bytes(full.to_bytes()) == full
