"""Writes to one stream what has piled up for it, once a turn of the event loop.

On a local socket that takes a callback and no task: nobody has to be woken. Where the peer does not read, and on gRPC's
streams, `run` waits for it; what comes meanwhile piles up with its owner, and leaves as one. So does what comes within
`interval_seconds` after a write: whoever reads is then woken once for all of it.
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
    """`take` returns all that waits, and None when nothing does. If that is more than one message may have, it returns
    some of it, and calls `wake` for the rest."""

    def __init__(self, stream: Any, take: Callable[[], Out | None], interval_seconds: float = 0.0) -> None:
        """`stream`: a LocalStream, or a stream of gRPC's, on either side. What comes less than `interval_seconds` after
        a write leaves when they have passed, anything else at once."""
        self._stream = stream
        self._local: LocalStream[Any, Out] | None = stream if isinstance(stream, LocalStream) else None
        self._take = take
        self._interval_seconds = interval_seconds
        self._rests_until = 0.0
        self._loop = asyncio.get_running_loop()
        self._is_due = False
        """What waits will be taken without another `wake`."""
        self._is_finishing = False
        self._fault: Exception | None = None
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """Something waits. Cheap to call again."""
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
        """Break the stream off: too much waits."""
        self._stream.cancel()

    async def run(self) -> None:
        """Until `finish`. Raises AioRpcError and InvalidStateError when the stream breaks, and what `take` raises."""
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
                local.write_now(message)  # should the stream be broken, whoever reads from it hears of that
        except Exception as error:  # `run` raises it
            self._fault = error
            self._wake.set()

    def _begin(self) -> None:
        self._is_due = False
        if self._interval_seconds:
            self._rests_until = time.monotonic() + self._interval_seconds
