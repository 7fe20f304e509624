"""The deadlines of live requests."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

from router.core.live import LiveRequest


class Deadlines:
    """A heap with one entry per request and kind of deadline. Entries of ended requests stay until their time, or until
    they outnumber the live ones."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, LiveRequest]] = []
        self._count = 0

    def add(self, deadline: float, request: LiveRequest) -> None:
        self._count += 1
        heapq.heappush(self._heap, (deadline, self._count, request))

    def has_due(self, now: float) -> bool:
        """True when a deadline has passed, perhaps that of a request that has ended."""
        return bool(self._heap) and self._heap[0][0] <= now

    def pop_due(self, now: float) -> Iterator[LiveRequest]:
        """Remove and yield live requests with a deadline that has passed."""
        while self._heap and self._heap[0][0] <= now:
            request = heapq.heappop(self._heap)[2]
            if request.num_open_choices:
                yield request

    def drop_ended(self, num_live: int) -> None:
        """Keep memory in proportion to the live requests. Cheap when there is nothing to do."""
        if len(self._heap) > 64 + 4 * num_live:
            self._heap = [entry for entry in self._heap if entry[2].num_open_choices]
            heapq.heapify(self._heap)

    def next(self) -> float:
        """The earliest deadline of a live request; infinity: there is none."""
        heap = self._heap
        while heap and not heap[0][2].num_open_choices:
            heapq.heappop(heap)
        return heap[0][0] if heap else math.inf
