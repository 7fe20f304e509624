"""Writes the pending messages of one stream, once per iteration of the event loop.

On a local socket that takes a callback, and no task has to be woken. Where the peer does not read, and on gRPC's
streams, `run` waits for it. Messages that arrive meanwhile accumulate with their owner, and are sent as one. So do
those that arrive within `interval_seconds` after a write: the reader is then woken once for all of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from kvloom.transport.local_stream import LocalStream

Out = TypeVar("Out", bound=Message)


class FrameWriter(Generic[Out]):
    """Calls `take` for the pending messages, merged into one; it returns None when there are none. If they are too much
    for one message, `take` returns a part of them, and calls `wake` for the rest."""

    def __init__(self, stream: Any, take: Callable[[], Out | None], interval_seconds: float = 0.0) -> None:
        """`stream`: a LocalStream, or a gRPC stream of either side. Messages that arrive less than `interval_seconds`
        after a write are sent when that time has passed, all others at once."""
        self._stream = stream
        self._local: LocalStream[Any, Out] | None = stream if isinstance(stream, LocalStream) else None
        self._take = take
        self._interval_seconds = interval_seconds
        self._rests_until = 0.0
        self._loop = asyncio.get_running_loop()
        self._is_due = False
        """A write is scheduled; another `wake` is not needed."""
        self._is_finishing = False
        self._fault: Exception | None = None
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """Schedule a write. Calling it again is cheap."""
        if self._is_due:
            return
        self._is_due = True
        write = self._wake.set if self._local is None else self._write_now
        rest_seconds = self._rests_until - time.monotonic() if self._interval_seconds else 0.0
        if rest_seconds > 0:
            self._loop.call_later(rest_seconds, write)
        elif self._local is None:
            write()
        else:
            self._loop.call_soon(write)

    def finish(self) -> None:
        """Let `run` return once everything is written."""
        self._is_finishing = True
        self._wake.set()

    def give_up(self) -> None:
        """Cancel the stream, because too much is pending."""
        self._stream.cancel()

    async def run(self) -> None:
        """Run until `finish`. Raises AioRpcError or InvalidStateError when the stream breaks, and what `take`
        raises."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._fault is not None:
                raise self._fault
            self._begin()
            while (message := self._take()) is not None:
                await self._stream.write(message)
            if self._is_finishing:
                return

    def _write_now(self) -> None:
        local = self._local
        assert local is not None
        if not self._is_due:  # `run` was faster
            return
        if local.is_choked:
            self._wake.set()
            return
        self._begin()
        try:
            message = self._take()
            if message is not None:
                local.write_now(message)  # if the stream is broken, its reader gets the error
        except Exception as error:  # `run` raises it
            self._fault = error
            self._wake.set()

    def _begin(self) -> None:
        self._is_due = False
        if self._interval_seconds:
            self._rests_until = time.monotonic() + self._interval_seconds
