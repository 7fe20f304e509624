"""An engine that a test controls: the test supplies every step, and can let the engine die."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from shard_server.engines.base import (
    Capability,
    EngineError,
    EngineInfo,
    EngineRequest,
    SequenceEnd,
    SequenceFinishReason,
    StepOutput,
)


class ScriptedEngine:
    def __init__(self, vocab_size: int = 49152) -> None:
        self.info = EngineInfo(
            engine="scripted",
            model="model",
            block_size=16,
            num_blocks=64,
            max_batch=8,
            max_model_len=1024,
            vocab_size=vocab_size,
            eos_token_ids=frozenset({2}),
            capabilities=frozenset(Capability) - {Capability.ADAPTERS, Capability.CROSS_ENCODE},
        )
        self.submitted: list[EngineRequest] = []
        self.cancelled: list[str] = []
        self.refusal: EngineError | None = None
        """The error that `submit` raises."""
        self._outputs: asyncio.Queue[StepOutput | Exception | None] = asyncio.Queue()

    async def start(self) -> None:
        """Nothing to load."""

    def submit(self, request: EngineRequest) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.submitted.append(request)

    def cancel(self, request_id: str) -> None:
        """The protocol allows two steps until the end; the test supplies the step with it."""
        self.cancelled.append(request_id)

    def put(self, output: StepOutput) -> None:
        self._outputs.put_nowait(output)

    def put_tokens(self, request: EngineRequest, *token_ids: int, end: SequenceFinishReason | None = None) -> None:
        """A step in which one sequence has output."""
        ends = [] if end is None else [SequenceEnd(request.request_id, end)]
        self.put(StepOutput([request.request_id], [list(token_ids)], ends=ends))

    def die(self, message: str = "out of memory") -> None:
        self._outputs.put_nowait(EngineError(message))

    async def steps(self) -> AsyncIterator[StepOutput]:
        while True:
            output = await self._outputs.get()
            if output is None:
                return
            if isinstance(output, Exception):
                raise output
            yield output

    async def close(self) -> None:
        self._outputs.put_nowait(None)
