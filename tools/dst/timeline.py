"""Virtual time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from tools.dst.violation import Violation

MAX_CALLBACKS = 500_000


class Timeline:
    """Callbacks run in the order of their times, those of one time in the order in which they were added."""

    def __init__(self, start: float) -> None:
        self.now = start
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def after(self, seconds: float, callback: Callable[..., None], *args: Any) -> None:
        self.at(self.now + seconds, callback, *args)

    def at(self, time: float, callback: Callable[..., None], *args: Any) -> None:
        self._count += 1
        heapq.heappush(self._heap, (max(time, self.now), self._count, callback, args))

    def run_until(self, end: float) -> None:
        """Raises Violation when so much happens that something must be going round in circles."""
        heap = self._heap
        while heap and heap[0][0] <= end:
            time, _, callback, args = heapq.heappop(heap)
            self.now = time
            if self._count > MAX_CALLBACKS:
                raise Violation("comes_to_rest", f"more than {MAX_CALLBACKS} things happened")
            callback(*args)
        self.now = end
