"""Output that the consumer has not read yet: one StepOutput that grows within bounds.

TensorRT-LLM cannot be paused. A sequence whose unread tokens reach MAX_UNREAD_TOKENS is therefore not read further
until the consumer has taken the buffer; its tokens wait inside the library, where max_tokens bounds them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from shard_server.engines.base import KvEvent, SequenceEnd, SequenceStart, StepOutput
from shard_server.engines.tensorrt_llm.requests.request_stream import StreamDelta

MAX_UNREAD_TOKENS: Final = 32
"""The limit for one sequence."""


class OutputBuffer:
    """Filled by the request tasks and emptied by `steps`, on one event loop."""

    def __init__(self) -> None:
        self._pending: StepOutput | None = None
        self._position: dict[str, int] = {}
        """By request_id: the index of its entry in the pending output."""
        self._readable = asyncio.Event()
        self._taken = asyncio.Event()
        self.unread_since: float | None = None
        """The loop's time when the oldest unread output was added; None while the buffer is empty."""

    def add_start(self, start: SequenceStart) -> None:
        self._open().starts.append(start)

    def add_delta(self, request_id: str, delta: StreamDelta) -> None:
        """Add the tokens and logprobs of `delta`; its end is added by `add_end`."""
        output = self._open()
        position = self._position.get(request_id)
        if position is None:
            self._position[request_id] = len(output.request_ids)
            output.request_ids.append(request_id)
            output.token_ids.append(delta.token_ids)
            if delta.logprobs:
                output.logprobs[request_id] = delta.logprobs
        else:
            output.token_ids[position] += delta.token_ids
            if delta.logprobs:
                output.logprobs[request_id] = [*output.logprobs.get(request_id, ()), *delta.logprobs]

    def add_end(self, end: SequenceEnd) -> None:
        self._open().ends.append(end)

    def add_kv_events(self, events: Sequence[KvEvent]) -> None:
        if events:
            self._open().kv_events += events

    def is_full(self, request_id: str) -> bool:
        """True when the request must not be read until `until_taken` returns."""
        position = self._position.get(request_id)
        if position is None or self._pending is None:
            return False
        return len(self._pending.token_ids[position]) >= MAX_UNREAD_TOKENS

    async def until_taken(self) -> None:
        await self._taken.wait()

    def release_waiters(self) -> None:
        """Let all callers of `until_taken` check again, because one of their requests was cancelled."""
        self._taken.set()
        if self._pending is not None:
            self._taken.clear()

    async def until_readable(self) -> None:
        await self._readable.wait()

    def wake_reader(self) -> None:
        """Let `until_readable` return without output, because the engine ends."""
        self._readable.set()

    def take(self) -> StepOutput | None:
        output = self._pending
        self._pending = None
        self._position.clear()
        self._readable.clear()
        self.unread_since = None
        self._taken.set()
        return output

    def _open(self) -> StepOutput:
        if self._pending is None:
            self._pending = StepOutput()
            self._taken.clear()
            self._readable.set()
            self.unread_since = asyncio.get_running_loop().time()
        return self._pending
