"""When each shard with a queue is expected to take more, if no event comes before."""

from __future__ import annotations

import heapq
import math
from typing import Final

_MIN_COMPACTED: Final = 16
"""Fewer entries are never worth sorting again."""


class Openings:
    """The times by shard. A heap whose entries are void when the shard has another time by now, so that neither an
    event nor a question for the next time looks at every shard."""

    __slots__ = ("_at", "_heap")

    def __init__(self) -> None:
        self._at: dict[str, float] = {}
        """Only finite times."""
        self._heap: list[tuple[float, str]] = []

    def set(self, shard_id: str, at: float) -> None:
        """The shard takes more at that time, in place of the one set before; infinity: only an event opens it."""
        if at == math.inf:
            self.discard(shard_id)
            return
        if self._at.get(shard_id) == at:
            return
        self._at[shard_id] = at
        heapq.heappush(self._heap, (at, shard_id))
        if len(self._heap) > 2 * len(self._at) + _MIN_COMPACTED:
            self._heap = [(at, shard_id) for shard_id, at in self._at.items()]
            heapq.heapify(self._heap)

    def discard(self, shard_id: str) -> None:
        """The shard has no time."""
        self._at.pop(shard_id, None)

    def next(self) -> float:
        """The earliest time; infinity: there is none."""
        heap = self._heap
        while heap:
            at, shard_id = heap[0]
            if self._at.get(shard_id) == at:
                return at
            heapq.heappop(heap)
        return math.inf

    def take_due(self, now: float) -> list[str]:
        """Remove and return the shards whose time has come, the earliest first."""
        due: list[str] = []
        while self.next() <= now:
            _, shard_id = heapq.heappop(self._heap)
            del self._at[shard_id]
            due.append(shard_id)
        return due
