"""Keeps proxies from cutting streams that send nothing for a while: before a first token, or between two.

All streams of an edge share one timer. It looks at how many events each has sent, so that a stream whose tokens flow
costs nothing for a token, and one whose first token comes soon costs nothing for its head.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from typing import Final, Protocol

TURNS: Final = 4
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

    def begin_early(self) -> None:
        """Send the head, if that is not sent yet and need not wait for the first event. Does not raise."""
        ...

    def keep_alive(self) -> None:
        """Send something that is no event. Does not raise."""
        ...


class KeepAlive:
    """The streams of one event loop. Its timer runs while there are streams."""

    def __init__(self, idle_seconds: float, head_seconds: float = 0.0) -> None:
        """`idle_seconds`: a stream that sends no event for so long is kept alive. `head_seconds`: a stream that was not
        refused in that time begins, before twice that time is over. 0: never."""
        turn_seconds, head_tick = idle_seconds / TURNS, head_seconds / 2
        self._ticks_per_turn = math.ceil(turn_seconds / head_tick) if turn_seconds and head_tick else 1
        self._tick_seconds = turn_seconds / self._ticks_per_turn or head_tick
        self._keeps_alive = bool(turn_seconds)
        # The first tick of a stream may follow at once.
        self._head_ticks = math.ceil(head_seconds / self._tick_seconds) + 1 if head_seconds else 0
        self._watches: dict[WatchedStream, list[int]] = {}
        """Holds for each stream, the oldest first: its events at the last turn, the turns since then, and the ticks
        until its head was due."""
        self._num_ticks = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        return self._timer is not None

    def add(self, stream: WatchedStream) -> None:
        """A stream that has sent nothing yet."""
        if self._tick_seconds:
            self._watches[stream] = [0, 0, 0]
            if self._timer is None:
                self._start()

    def discard(self, stream: WatchedStream) -> None:
        """A stream that is not discarded is forgotten after it is over."""
        self._watches.pop(stream, None)

    def _start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._tick_seconds, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._num_ticks += 1
        if self._head_ticks:
            self._begin_due()
        if self._num_ticks % self._ticks_per_turn == 0:
            self._look_at_all()
        if self._watches:
            self._start()

    def _begin_due(self) -> None:
        """Looks at the youngest streams only: those before them have had their turn."""
        young = list(itertools.takewhile(self._is_young, reversed(self._watches.items())))
        for stream, watch in young:
            watch[2] += 1
            if watch[2] == self._head_ticks and not stream.is_over:
                stream.begin_early()

    def _is_young(self, item: tuple[WatchedStream, list[int]]) -> bool:
        return item[1][2] < self._head_ticks

    def _look_at_all(self) -> None:
        for stream, watch in list(self._watches.items()):
            if stream.is_over:
                del self._watches[stream]
            elif not self._keeps_alive:
                continue
            elif stream.num_events != watch[0]:
                watch[:2] = stream.num_events, 0
            else:
                watch[1] += 1
                if watch[1] == TURNS:
                    watch[1] = 0
                    stream.keep_alive()
