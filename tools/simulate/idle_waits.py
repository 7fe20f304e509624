"""Counts requests that waited in the router beside an idle shard for longer than they may
(router/core/dispatch/idle_bound.py).

It looks at the modelled shards themselves, and not at what a router believes of them. A request may wait for as long as
its whole prompt would take to compute on an idle shard, as if nothing of it were cached there.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from router.core.dispatch.idle_bound import MAX_IDLE_WAIT_SECONDS, waits_too_long

_MAX_PERIODS: Final = 1024


class IdleWaits:
    """The shards of one model, and the requests that wait for them."""

    def __init__(self) -> None:
        self.num_too_long = 0
        """The requests that waited for too long."""
        self._idle: set[int] = set()
        """Indices of shards that have nothing to do."""
        self._since = math.inf
        """Since when there has always been one; infinity: there is none."""
        self._periods: deque[tuple[float, float]] = deque(maxlen=_MAX_PERIODS)
        """Earlier times with one, from and to, in their order: those that are long enough to count."""
        self._arrived_at: dict[str, float] = {}
        """Requests that have not begun anywhere, by request_id."""

    def note_shard(self, index: int, now: float, *, is_idle: bool) -> None:
        """The shard has something to do now, or has not."""
        if is_idle:
            if not self._idle:
                self._since = now
            self._idle.add(index)
        elif index in self._idle:
            self._idle.discard(index)
            if not self._idle:
                if now - self._since > MAX_IDLE_WAIT_SECONDS:
                    self._periods.append((self._since, now))
                self._since = math.inf

    def note_arrival(self, request_id: str, now: float) -> None:
        """The request has come to its router."""
        self._arrived_at[request_id] = now

    def note_begin(self, request_id: str, prefill_seconds: float, now: float) -> None:
        """The request, or the first part of its prompt, is sent to a shard, where all of it takes so long. To be called
        before that shard has it."""
        arrived_at = self._arrived_at.pop(request_id, None)
        if arrived_at is None:  # it began before
            return
        longest = now - max(arrived_at, self._since)
        for since, until in reversed(self._periods):
            if until <= arrived_at:
                break
            longest = max(longest, until - max(since, arrived_at))
        self.num_too_long += waits_too_long(longest, prefill_seconds)

    def note_end(self, request_id: str) -> None:
        """The request has ended, maybe without having begun."""
        self._arrived_at.pop(request_id, None)
