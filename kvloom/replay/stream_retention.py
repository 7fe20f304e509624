"""Which resumable answers of a process are kept, and how much of them: one policy for the edge and the router."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from kvloom.config import ResumeConfig
from kvloom.replay.event_log import ByteBudget, EventLog


class KeptStream(Protocol):
    @property
    def is_attended(self) -> bool:
        """Whether a client reads it."""
        ...

    @property
    def log(self) -> EventLog: ...

    def abandon_soon(self) -> None:
        """End and forget it in the next turn of the event loop."""
        ...


S = TypeVar("S", bound=KeptStream)


class StreamRetention(Generic[S]):
    """`forget` is asked to drop an answer altogether (and has to `discard` it); `on_evicted` is told of each answer
    that lost events so that others keep theirs."""

    def __init__(self, config: ResumeConfig, forget: Callable[[S], None], on_evicted: Callable[[], None]) -> None:
        self._config = config
        self._forget = forget
        self._on_evicted = on_evicted
        self._budget = ByteBudget(config.max_bytes, self._make_room)
        self._running: OrderedDict[S, None] = OrderedDict()
        """By how long ago they were made to forget: the next to be asked comes first."""
        self._left: OrderedDict[S, None] = OrderedDict()
        """Of the running ones those that have lost a reader, by when; some may have one again."""
        self._ended: OrderedDict[S, None] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        return self._budget.num_bytes

    @property
    def num_unattended(self) -> int:
        """Running answers that no client reads."""
        return sum(not stream.is_attended for stream in self._running)

    def new_log(self, num_events: int = 0) -> EventLog:
        """`num_events`: that were appended elsewhere, and are not kept here."""
        return EventLog(self._config.max_response_bytes, self._budget, num_events)

    def add(self, stream: S) -> None:
        """It runs."""
        self._running[stream] = None

    def on_ended(self, stream: S) -> None:
        """Its answer is complete; it is kept as it is."""
        if stream in self._running:
            del self._running[stream]
            self._left.pop(stream, None)
            self._ended[stream] = None

    def on_left(self, stream: S) -> None:
        """Running answers without a reader hold places that others want: of too many, the longest without one go."""
        if stream not in self._running:
            return
        left = self._left
        left[stream] = None
        left.move_to_end(stream)
        while len(left) > self._config.max_unattended:
            oldest, _ = left.popitem(last=False)
            if not oldest.is_attended:
                oldest.abandon_soon()

    def discard(self, stream: S) -> None:
        """It is not kept any more."""
        self._running.pop(stream, None)
        self._left.pop(stream, None)
        self._ended.pop(stream, None)

    def _make_room(self) -> None:
        """The oldest answers go first, complete ones before those that are being written."""
        budget = self._budget
        while budget.num_bytes > budget.max_bytes and self._ended:
            stream, _ = self._ended.popitem(last=False)
            self._on_evicted()
            if stream.is_attended:
                stream.log.forget()  # its reader is told
            else:
                self._forget(stream)
        for _ in range(len(self._running)):
            if budget.num_bytes <= budget.max_bytes:
                return
            stream = next(iter(self._running))
            self._running.move_to_end(stream)
            self._on_evicted()
            stream.log.forget()
