"""Runs an engine for a test, and records its tokens, ends and blocks for the suite's checks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

from shard_server.engines.base import (
    BlockRemoved,
    BlockStored,
    Engine,
    EngineLoad,
    EngineRequest,
    KvEvent,
    Sampling,
    SequenceFinishReason,
    SequenceStart,
    StepOutput,
    TokenLogprobs,
)

STEP_TIMEOUT_SECONDS = 30.0


def prompt_of(number: int, num_tokens: int) -> list[int]:
    """A prompt of ordinary tokens, different for every number."""
    return random.Random(number).choices(range(500, 5000), k=num_tokens)


def request_of(request_id: str, prompt: Sequence[int], max_tokens: int, **changes: Any) -> EngineRequest:
    sampling = changes.pop("sampling", Sampling(seed=7))
    return EngineRequest(request_id, prompt, sampling, max_tokens, **changes)


class EngineDriver:
    """Reads one step after another; asserts what must hold for every output."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._steps = engine.steps()
        self._reading: asyncio.Task[StepOutput | None] | None = None
        """The read of the next output; its result is None if the engine was closed."""
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        self.starts: dict[str, SequenceStart] = {}
        self.ends: dict[str, SequenceFinishReason] = {}
        self.embeddings: dict[str, bytes] = {}
        self.handoffs: dict[str, bytes] = {}
        self.kv_events: list[KvEvent] = []
        self.load = EngineLoad()
        self.max_preemptions = 0

    async def step(self) -> StepOutput:
        """The next output. Raises StopAsyncIteration when the engine was closed."""
        async with asyncio.timeout(STEP_TIMEOUT_SECONDS):
            await self._read_on()
        output = self._take()
        if output is None:
            raise StopAsyncIteration
        return output

    async def read_ready(self) -> None:
        """Read everything that has been computed: an engine continues while a busy machine delays the test."""
        while True:
            reading = self._read_on()
            await asyncio.sleep(0)
            if not reading.done() or self._take() is None:
                return

    def _read_on(self) -> asyncio.Task[StepOutput | None]:
        async def read() -> StepOutput | None:
            return await anext(self._steps, None)

        self._reading = self._reading or asyncio.create_task(read())
        return self._reading

    def _take(self) -> StepOutput | None:
        """Record an output that was read."""
        assert self._reading is not None
        reading, self._reading = self._reading, None
        output = reading.result()
        if output is not None:
            self._record(output)
        return output

    async def step_until(self, reached: Callable[[], bool], max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if reached():
                return
            await self.step()
        raise AssertionError(f"not reached within {max_steps} steps")

    async def run(self, *requests: EngineRequest) -> list[list[int]]:
        """Submit all, read until all have ended; returns their tokens."""
        for request in requests:
            self.engine.submit(request)
        await self.step_until(lambda: all(request.request_id in self.ends for request in requests))
        return [self.tokens[request.request_id] for request in requests]

    def cached(self) -> set[int]:
        """Replays the KV events, asserting that they make sense."""
        cached: set[int] = set()
        for event in self.kv_events:
            match event:
                case BlockStored(hashes):
                    assert hashes, "an event without blocks"
                    assert cached.isdisjoint(hashes), "stored twice"
                    cached.update(hashes)
                case BlockRemoved(hashes):
                    assert hashes, "an event without blocks"
                    assert cached.issuperset(hashes), "removed without having been stored"
                    cached.difference_update(hashes)
                case _:
                    cached.clear()
            assert len(cached) <= self.engine.info.num_blocks
        return cached

    def _record(self, output: StepOutput) -> None:
        assert len(set(output.request_ids)) == len(output.request_ids) == len(output.token_ids)
        assert output.logprobs.keys() <= set(output.request_ids)
        for start in output.starts:
            assert start.request_id not in self.starts, "started twice"
            has_token = start.request_id in output.request_ids
            has_vector = any(end.request_id == start.request_id and end.embedding for end in output.ends)
            assert has_token or has_vector, "a start comes with the first token, or with the embedding"
            self.starts[start.request_id] = start
        for request_id, token_ids in zip(output.request_ids, output.token_ids, strict=True):
            assert token_ids, "an entry without tokens"
            assert request_id not in self.ends, "a token behind the end"
            assert request_id in self.starts, "a token before the start"
            self.tokens.setdefault(request_id, []).extend(token_ids)
            if request_id in output.logprobs:
                assert len(output.logprobs[request_id]) == len(token_ids)
                self.logprobs.setdefault(request_id, []).extend(output.logprobs[request_id])
        for end in output.ends:
            assert end.request_id not in self.ends, "ended twice"
            self.ends[end.request_id] = end.reason
            if end.embedding:
                self.embeddings[end.request_id] = end.embedding
            if end.handoff:
                self.handoffs[end.request_id] = end.handoff
        self.kv_events += output.kv_events
        self.load = output.load
        assert 0 <= output.load.num_available_blocks <= self.engine.info.num_blocks
        assert output.load.num_running <= self.engine.info.max_batch
        _assert_shares_add_up(output.load)
        self.max_preemptions = max(self.max_preemptions, output.load.num_preemptions)


def _assert_shares_add_up(load: EngineLoad) -> None:
    sums = EngineLoad.of(load.shares)
    assert (sums.num_running, sums.num_waiting) == (load.num_running, load.num_waiting)
    assert sums.num_queued_prefill_tokens == load.num_queued_prefill_tokens
    assert sums.num_decode_context_tokens == load.num_decode_context_tokens
