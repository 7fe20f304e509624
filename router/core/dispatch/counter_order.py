"""Names in the order of counters that only grow, at little cost however many names there are."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Final, Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)

_MIN_COMPACTED: Final = 16
"""Fewer entries are never worth sorting again."""


class CounterOrder(Generic[Name]):
    """The name with the lowest counter is first; of equal ones, that which was added first.

    A heap of the counters as they were when they were last looked at. As they only grow, an entry that has become wrong
    stands too far ahead: it is corrected when it reaches the front. A change of a counter therefore costs nothing by
    itself, and a removed name stays in the heap until it is met there, or until most of the heap are such names.
    """

    __slots__ = ("_added", "_counter", "_heap", "_num_added")

    def __init__(self, counter: Callable[[Name], Any]) -> None:
        self._counter = counter
        self._heap: list[tuple[Any, int, Name]] = []
        self._added: dict[Name, int] = {}
        """Name → its number. Entries with another number are void."""
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._added)

    def __contains__(self, name: Name) -> bool:
        return name in self._added

    def add(self, name: Name) -> None:
        """Add a name that is not among them."""
        self._num_added += 1
        self._added[name] = self._num_added
        heapq.heappush(self._heap, (self._counter(name), self._num_added, name))

    def discard(self, name: Name) -> None:
        if self._added.pop(name, None) is not None and len(self._heap) > 2 * len(self._added) + _MIN_COMPACTED:
            self._heap = [entry for entry in self._heap if self._added.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def first(self) -> Name | None:
        """The name with the lowest counter."""
        heap, added, counter = self._heap, self._added, self._counter
        while heap:
            value, number, name = heap[0]
            if added.get(name) != number:
                heapq.heappop(heap)
                continue
            now = counter(name)
            if now <= value:
                return name
            heapq.heapreplace(heap, (now, number, name))
        return None

    def in_order(self) -> Iterator[Name]:
        """All names. Nothing may change before the last one that is wanted."""
        if self.first() is None:
            return
        heap, added, counter = self._heap, self._added, self._counter
        front: list[tuple[Any, int, int | None, Name]] = [(heap[0][0], heap[0][1], 0, heap[0][2])]
        while front:
            value, number, place, name = heapq.heappop(front)
            if place is not None:  # what stands below it in the heap comes no earlier
                for below in range(2 * place + 1, min(2 * place + 3, len(heap))):
                    heapq.heappush(front, (heap[below][0], heap[below][1], below, heap[below][2]))
            if added.get(name) != number:
                continue
            now = counter(name)
            if now <= value:
                yield name
            else:
                heapq.heappush(front, (now, number, None, name))
