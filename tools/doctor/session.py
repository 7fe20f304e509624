"""A session with an engine under test: its steps are read continuously and recorded by sequence."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvloom_common.text.tokenizer import ModelTokenizer
from shard_server.engines.base import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Engine,
    EngineLoad,
    EngineRequest,
    Sampling,
    SequenceEnd,
    SequenceStart,
    StepOutput,
    TokenLogprobs,
)

WAIT_SECONDS: Final = 120.0
KV_EVENT_SECONDS: Final = 10.0

GREEDY: Final = Sampling(temperature=0.0)


@dataclasses.dataclass(slots=True)
class Observed:
    """A sequence as recorded from the steps of the engine."""

    request: EngineRequest
    chunks: list[list[int]] = dataclasses.field(default_factory=list)
    """New tokens, one list per step."""
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    start: SequenceStart | None = None
    end: SequenceEnd | None = None

    @property
    def token_ids(self) -> list[int]:
        return [token_id for chunk in self.chunks for token_id in chunk]

    @property
    def num_cached_tokens(self) -> int:
        return 0 if self.start is None else self.start.num_cached_tokens


class EngineSession:
    """Use `async with` around a started engine. An exception of the engine is raised by the waiting methods."""

    def __init__(
        self, engine: Engine, tokenizer: ModelTokenizer, *, kv_event_seconds: float = KV_EVENT_SECONDS
    ) -> None:
        """`kv_event_seconds`: how long the events of a computed prompt may take."""
        self.engine = engine
        self.tokenizer = tokenizer
        self.kv_event_seconds = kv_event_seconds
        self.load = EngineLoad()
        self.cached_hashes: set[int] = set()
        self.num_kv_events = 0
        self.num_steps = 0
        self._observed: dict[str, Observed] = {}
        self._changed = asyncio.Event()
        self._numbers = itertools.count(1)
        self._reader: asyncio.Task[None] | None = None

    async def __aenter__(self) -> EngineSession:
        self._reader = asyncio.create_task(self._read())
        self._reader.add_done_callback(lambda _: self._changed.set())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._reader

    @property
    def is_reading(self) -> bool:
        """True while the engine has not ended."""
        return self._reader is not None and not self._reader.done()

    def prompt_of(self, num_tokens: int, seed: int) -> list[int]:
        """Ordinary tokens, which differ for every seed."""
        ends = self.engine.info.eos_token_ids
        ids = [token for token in range(min(self.engine.info.vocab_size, 4000)) if token not in ends]
        return random.Random(seed).choices(ids[len(ids) // 4 :], k=num_tokens)

    def submit(self, prompt: Sequence[int], max_tokens: int, sampling: Sampling = GREEDY, **fields: Any) -> Observed:
        """Raises EngineError."""
        request = EngineRequest(f"doctor-{next(self._numbers)}", prompt, sampling, max_tokens, **fields)
        self.engine.submit(request)
        observed = self._observed[request.request_id] = Observed(request)
        return observed

    async def run(self, prompt: Sequence[int], max_tokens: int, sampling: Sampling = GREEDY, **fields: Any) -> Observed:
        observed = self.submit(prompt, max_tokens, sampling, **fields)
        await self.until(lambda: observed.end is not None, "the sequence's end")
        return observed

    async def until(self, reached: Callable[[], bool], what: str, seconds: float = WAIT_SECONDS) -> None:
        """Wait for a condition. There may be one waiter at a time. Raises TimeoutError with `what`, or the exception of
        the engine."""
        assert self._reader is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not reached() and not self._reader.done():
                    self._changed.clear()
                    await self._changed.wait()
        if reached():
            return
        if self._reader.done():
            self._reader.result()
        raise TimeoutError(f"{what} did not arrive within {seconds:g} s")

    async def _read(self) -> None:
        async for output in self.engine.steps():
            self._take(output)
            self._changed.set()

    def _take(self, output: StepOutput) -> None:
        self.num_steps += 1
        self.load = output.load
        for start in output.starts:
            self._observed[start.request_id].start = start
        for request_id, token_ids in zip(output.request_ids, output.token_ids, strict=True):
            observed = self._observed[request_id]
            observed.chunks.append(token_ids)
            observed.logprobs += output.logprobs.get(request_id, ())
        for end in output.ends:
            self._observed[end.request_id].end = end
        for event in output.kv_events:
            self.num_kv_events += 1
            match event:
                case BlockStored(hashes):
                    self.cached_hashes.update(hashes)
                case BlockRemoved(hashes):
                    self.cached_hashes.difference_update(hashes)
                case AllBlocksCleared():
                    self.cached_hashes.clear()
