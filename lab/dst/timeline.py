"""Virtual time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from lab.dst.checker import Violation

MAX_CALLBACKS = 500_000


class Timeline:
    """A queue of callbacks. They run in the order of their times, those of the same time in the order of insertion."""

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
        """Raises Violation after so many callbacks that something must be looping."""
        heap = self._heap
        while heap and heap[0][0] <= end:
            time, _, callback, args = heapq.heappop(heap)
            self.now = time
            if self._count > MAX_CALLBACKS:
                raise Violation("reaches_quiescence", f"more than {MAX_CALLBACKS} callbacks ran")
            callback(*args)
        self.now = end
