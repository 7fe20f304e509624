"""The events of one response that can still be replayed: bytes, numbered from 1, bounded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

EVENT_OVERHEAD_BYTES: Final = 48
"""What an event costs beside its bytes: the head of the object and its place in a list."""
LOG_OVERHEAD_BYTES: Final = 2048
"""What a response costs beside its events, so that many small ones are bounded too."""
_COMPACT_EVENTS: Final = 1024


class ByteBudget:
    """What all logs of a process may hold together. `on_exceeded` is called by the append that exceeds it, and must
    make room at once."""

    __slots__ = ("max_bytes", "num_bytes", "on_exceeded")

    def __init__(self, max_bytes: int, on_exceeded: Callable[[], None]) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.on_exceeded = on_exceeded


class EventLog:
    """Appends in constant time. What exceeds `max_bytes` is forgotten from the oldest event on."""

    __slots__ = ("_budget", "_events", "_head", "_max_bytes", "num_bytes", "num_events")

    def __init__(self, max_bytes: int, budget: ByteBudget, num_events: int = 0) -> None:
        """`num_events`: numbers go on from there."""
        self._max_bytes = max_bytes
        self._budget = budget
        self._events: list[bytes] = []
        self._head = 0
        """Where the kept events begin in `_events`; what lies before is forgotten."""
        self.num_events = num_events
        """All that were ever appended: the number of the last."""
        self.num_bytes = LOG_OVERHEAD_BYTES
        budget.num_bytes += LOG_OVERHEAD_BYTES
        if budget.num_bytes > budget.max_bytes:
            budget.on_exceeded()

    @property
    def first_number(self) -> int:
        """Of the oldest event that is kept; of the next one when none is."""
        return self.num_events - (len(self._events) - self._head) + 1

    @property
    def num_forgotten(self) -> int:
        return self.first_number - 1

    def append(self, event: bytes) -> None:
        """`event` gets the number `num_events` + 1."""
        self._events.append(event)
        self.num_events += 1
        # For every token: no calls but these.
        budget = self._budget
        size_bytes = len(event) + EVENT_OVERHEAD_BYTES
        self.num_bytes += size_bytes
        budget.num_bytes += size_bytes
        if self.num_bytes > self._max_bytes:
            self._forget_oldest()
        if budget.num_bytes > budget.max_bytes:
            budget.on_exceeded()

    def holds(self, after: int) -> bool:
        """Whether all events after that number are kept."""
        return after + 1 >= self.first_number

    def read(self, after: int, max_bytes: int) -> Sequence[bytes]:
        """Events from number `after` + 1 on, at least one if there is any, up to about `max_bytes`. The caller has
        made sure that the log `holds` them."""
        begin = end = self._head + after - self.num_forgotten
        events = self._events
        size_bytes = 0
        while end < len(events) and size_bytes < max_bytes:
            size_bytes += len(events[end])
            end += 1
        return events[begin:end]

    def read_all(self, after: int) -> Sequence[bytes]:
        """As `read`, without a bound but the log's own."""
        return self._events[self._head + after - self.num_forgotten :]

    def forget(self) -> None:
        """Forget all events; numbers go on."""
        freed_bytes = self.num_bytes - LOG_OVERHEAD_BYTES
        self._events.clear()
        self._head = 0
        self._give_back(freed_bytes)

    def close(self) -> None:
        """Nothing is appended any more, and nothing read."""
        self.forget()
        self._give_back(self.num_bytes)

    def _give_back(self, size_bytes: int) -> None:
        self.num_bytes -= size_bytes
        self._budget.num_bytes -= size_bytes

    def _forget_oldest(self) -> None:
        events, head, freed_bytes = self._events, self._head, 0
        while self.num_bytes - freed_bytes > self._max_bytes and head < len(events):
            freed_bytes += len(events[head]) + EVENT_OVERHEAD_BYTES
            events[head] = b""
            head += 1
        if head > _COMPACT_EVENTS and head > len(events) // 2:
            del events[:head]
            head = 0
        self._head = head
        self._give_back(freed_bytes)
