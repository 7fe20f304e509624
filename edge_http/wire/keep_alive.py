"""Keeps proxies from cutting streams that send nothing for a while: before a first token, or between two.

All streams of an edge share one timer. It looks at how many events each has sent, so that a stream whose tokens flow
costs nothing for a token.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

TICKS: Final = 4
"""How often all streams are looked at, in the time after which one is idle. A stream is silent for at most a quarter of
that time longer."""


class WatchedStream(Protocol):
    """A stream as the timer sees it."""

    @property
    def num_events(self) -> int:
        """The events so far."""
        ...

    @property
    def is_over(self) -> bool: ...

    def keep_alive(self) -> None:
        """Send something that is no event. Does not raise."""
        ...


class KeepAlive:
    """The streams of one event loop. Its timer runs while there are streams."""

    def __init__(self, idle_seconds: float) -> None:
        """`idle_seconds`: a stream that sends no event for so long is kept alive; 0: none is."""
        self._tick_seconds = idle_seconds / TICKS
        self._watches: dict[WatchedStream, list[int]] = {}
        """The streams with their events at the last tick, and the ticks since then."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        return self._timer is not None

    def add(self, stream: WatchedStream) -> None:
        """A stream that has sent nothing yet."""
        if self._tick_seconds:
            self._watches[stream] = [0, 0]
            if self._timer is None:
                self._start()

    def discard(self, stream: WatchedStream) -> None:
        """A stream that is not discarded is forgotten after it is over."""
        self._watches.pop(stream, None)

    def _start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._tick_seconds, self._tick)

    def _tick(self) -> None:
        self._timer = None
        for stream, watch in list(self._watches.items()):
            if stream.is_over:
                del self._watches[stream]
            elif stream.num_events != watch[0]:
                watch[:] = stream.num_events, 0
            else:
                watch[1] += 1
                if watch[1] == TICKS:
                    watch[1] = 0
                    stream.keep_alive()
        if self._watches:
            self._start()
