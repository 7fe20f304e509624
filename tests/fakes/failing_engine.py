"""An engine around a real one that fails or holds sequences where a test says so, and a simulated one that recites."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from typing import cast

from kvloom_common.config import ShardConfig
from shard_server.engines.base import (
    AdapterEngine,
    Adapters,
    Capability,
    Engine,
    EngineError,
    EngineInfo,
    EngineRequest,
    SequenceEnd,
    SequenceFinishReason,
    StepOutput,
)
from shard_server.engines.sim_engine import SimEngine
from shard_server.engines.sim_sequence import SimSequence
from shard_server.engines.sim_tokens import expected_token_id


class FailingEngine:
    """`fails_at(request)` returns the number of output tokens (including those of earlier attempts) after which a
    sequence fails here, or None if it does not fail. `die` ends the whole engine. `hold` lets it wait in the middle."""

    def __init__(self, inner: Engine) -> None:
        self._inner = inner
        self.fails_at: Callable[[EngineRequest], int | None] = lambda _: None
        self.num_failed = 0
        self.num_submitted = self.num_cancelled = 0
        self._limits: dict[str, int] = {}
        """By request id: the number of tokens that may still be emitted."""
        self._failed: set[str] = set()
        self._dead = asyncio.Event()
        self._held_at: int | None = None
        self._num_tokens: dict[str, int] = {}
        """By request id: the output tokens so far of each live sequence, with those of earlier attempts."""
        self._changed = asyncio.Event()

    @property
    def info(self) -> EngineInfo:
        return self._inner.info

    @property
    def adapters(self) -> Adapters:
        return cast(AdapterEngine, self._inner).adapters

    async def start(self) -> None:
        await self._inner.start()

    def submit(self, request: EngineRequest) -> None:
        self.num_submitted += 1
        position = self.fails_at(request)
        self._inner.submit(request)
        if position is not None:
            self._limits[request.request_id] = max(0, position - len(request.output_token_ids))
        self._num_tokens[request.request_id] = len(request.output_token_ids)
        self._changed.set()

    def cancel(self, request_id: str) -> None:
        self.num_cancelled += 1
        self._inner.cancel(request_id)

    async def steps(self) -> AsyncIterator[StepOutput]:
        async for output in self._inner.steps():
            if self._dead.is_set():
                raise EngineError("the test has ended this engine")
            yield self._cut(output)
            for request_id, token_ids in zip(output.request_ids, output.token_ids, strict=True):
                self._num_tokens[request_id] += len(token_ids)
            for end in output.ends:
                self._num_tokens.pop(end.request_id, None)
            while self._is_held():
                self._changed.clear()
                await self._changed.wait()

    def die(self) -> None:
        """The engine dies with the next step."""
        self._dead.set()

    def hold(self, num_tokens: int | None) -> None:
        """Makes no further step once every live sequence has so many tokens. None lets it go on."""
        self._held_at = num_tokens
        self._changed.set()

    def _is_held(self) -> bool:
        held_at, counts = self._held_at, self._num_tokens.values()
        return held_at is not None and bool(counts) and min(counts) >= held_at

    async def close(self) -> None:
        await self._inner.close()

    def _cut(self, output: StepOutput) -> StepOutput:
        if not self._limits and not self._failed:
            return output
        cut = dataclasses.replace(output, request_ids=[], token_ids=[], ends=[], logprobs=dict(output.logprobs))
        for request_id, token_ids in zip(output.request_ids, output.token_ids, strict=True):
            if request_id in self._failed:
                continue
            limit = self._limits.get(request_id)
            kept = token_ids if limit is None else token_ids[:limit]
            if kept:
                cut.request_ids.append(request_id)
                cut.token_ids.append(kept)
                if request_id in cut.logprobs:
                    cut.logprobs[request_id] = cut.logprobs[request_id][: len(kept)]
            if limit is None:
                continue
            self._limits[request_id] = limit - len(kept)
            if not self._limits[request_id]:
                del self._limits[request_id]
                self._failed.add(request_id)
                self.num_failed += 1
                self._inner.cancel(request_id)
                cut.ends.append(SequenceEnd(request_id, SequenceFinishReason.ERROR, "as the test wants it"))
        for end in output.ends:
            self._limits.pop(end.request_id, None)
            if end.request_id in self._failed:
                self._failed.discard(end.request_id)
            else:
                cut.ends.append(end)

        return cut


class RecitingEngine(SimEngine):
    """The simulated engine, except that it answers a prompt that begins with `cue` with `recital`, repeatedly."""

    def __init__(
        self, model_name: str, config: ShardConfig, vocab_size: int, recital: Sequence[int], cue: int, **options: int
    ) -> None:
        super().__init__(model_name, config, vocab_size, stamps=(0,), **options)
        self._recital = recital
        self._cue = cue

    @property
    def info(self) -> EngineInfo:
        promised = {
            Capability.LOGPROBS,
            Capability.SEEDED_RESUME,
            Capability.BATCH_INVARIANT,
            Capability.PREFIX_CACHING,
        }
        return dataclasses.replace(super().info, capabilities=frozenset(promised))

    def _stamp(self, sequence: SimSequence) -> int:
        request = sequence.request
        return self.token_at(request.prompt_token_ids, request.sampling.seed, sequence.num_output_tokens)

    def token_at(self, prompt: Sequence[int], seed: int, position: int) -> int:
        if prompt[0] == self._cue:
            return self._recital[position % len(self._recital)]
        return expected_token_id(prompt, seed, position)
