"""The log of the events of one response that can still be replayed. Events are bytes and are numbered from 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

EVENT_OVERHEAD_BYTES: Final = 48
"""The memory that an event takes besides its bytes: the head of the object and its place in a list."""
LOG_OVERHEAD_BYTES: Final = 2048
"""The memory that a response takes besides its events; counting it bounds many small responses too."""
_COMPACT_EVENTS: Final = 1024


class ReplayBudget:
    """The memory that all logs of a process may hold together. The append that exceeds it calls `on_exceeded`, which
    must make room at once."""

    __slots__ = ("max_bytes", "num_bytes", "on_exceeded")

    def __init__(self, max_bytes: int, on_exceeded: Callable[[], None]) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.on_exceeded = on_exceeded


class EventLog:
    """Appends in constant time. When it exceeds `max_bytes`, it forgets its oldest events."""

    __slots__ = ("_budget", "_events", "_head", "_max_bytes", "num_bytes", "num_events")

    def __init__(self, max_bytes: int, budget: ReplayBudget, num_events: int = 0) -> None:
        """The first event that is appended gets the number `num_events` + 1."""
        self._max_bytes = max_bytes
        self._budget = budget
        self._events: list[bytes] = []
        self._head = 0
        """The index in `_events` where the kept events begin; those before are forgotten."""
        self.num_events = num_events
        """The number of the last event that was appended."""
        self.num_bytes = LOG_OVERHEAD_BYTES
        budget.num_bytes += LOG_OVERHEAD_BYTES
        if budget.num_bytes > budget.max_bytes:
            budget.on_exceeded()

    @property
    def first_number(self) -> int:
        """The number of the oldest event that is kept; that of the next event if none is."""
        return self.num_events - (len(self._events) - self._head) + 1

    @property
    def num_forgotten(self) -> int:
        return self.first_number - 1

    def append(self, event: bytes) -> None:
        """`event` gets the number `num_events` + 1."""
        self._events.append(event)
        self.num_events += 1
        # This runs for every token, so it makes no more calls than these.
        budget = self._budget
        size_bytes = len(event) + EVENT_OVERHEAD_BYTES
        self.num_bytes += size_bytes
        budget.num_bytes += size_bytes
        if self.num_bytes > self._max_bytes:
            self._forget_oldest()
        if budget.num_bytes > budget.max_bytes:
            budget.on_exceeded()

    def holds(self, after: int) -> bool:
        """Returns whether all events after that number are kept."""
        return after + 1 >= self.first_number

    def read(self, after: int, max_bytes: int) -> Sequence[bytes]:
        """Returns the events from number `after` + 1 on, up to about `max_bytes`, and at least one if there is any. The
        caller has made sure that the log `holds` them."""
        begin = end = self._head + after - self.num_forgotten
        events = self._events
        size_bytes = 0
        while end < len(events) and size_bytes < max_bytes:
            size_bytes += len(events[end])
            end += 1
        return events[begin:end]

    def read_all(self, after: int) -> Sequence[bytes]:
        """Reads as `read` does, without a limit."""
        return self._events[self._head + after - self.num_forgotten :]

    def forget(self) -> None:
        """Forget all events; the numbers continue."""
        freed_bytes = self.num_bytes - LOG_OVERHEAD_BYTES
        self._events.clear()
        self._head = 0
        self._release(freed_bytes)

    def close(self) -> None:
        """Release the log's share of the budget. It must not be appended to or read any more."""
        self.forget()
        self._release(self.num_bytes)

    def _release(self, size_bytes: int) -> None:
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
        self._release(freed_bytes)
