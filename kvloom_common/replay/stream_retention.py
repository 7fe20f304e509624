"""Decides which resumable answers a process keeps, and how much of them. The edge and the router share this policy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from kvloom_common.config import ResumeConfig
from kvloom_common.replay.event_log import EventLog, ReplayBudget


class ResumeSettings(ResumeConfig):
    commit_seconds: float = 0.2
    """How long an event of an edge's stream may wait until Redis has it, so that another edge can continue exactly
    after the client's last event when this edge dies. Mostly it takes less than a millisecond."""
    max_unattended: int = 1024
    """Running answers that no client reads. If there are more, those that have waited longest are cancelled: each
    costs a shard what an answer that is read costs, and few clients come back."""
    max_journal_bytes: int = 32 * 2**20
    """The size of an edge's latest events in Redis, which other edges read after it has died: some seconds of all the
    tokens that an edge relays."""
    max_kept_answer_bytes: int = 64 * 2**20
    """The size of all answers together that an edge keeps for `Idempotency-Key`s and that are not streamed. The oldest
    are dropped first, and one caller may have half of it. An answer over `max_response_bytes` is not kept."""


class KeptStream(Protocol):
    """A resumable answer."""

    @property
    def is_attended(self) -> bool:
        """A client reads it."""
        ...

    @property
    def log(self) -> EventLog: ...

    def abandon_soon(self) -> None:
        """End and forget it in the next turn of the event loop."""
        ...


S = TypeVar("S", bound=KeptStream)


class StreamRetention(Generic[S]):
    """`forget` is called to drop an answer altogether, and has to `discard` it. `on_evicted` is called for each answer
    that loses events so that other answers keep theirs."""

    def __init__(self, config: ResumeSettings, forget: Callable[[S], None], on_evicted: Callable[[], None]) -> None:
        self._config = config
        self._forget = forget
        self._on_evicted = on_evicted
        self._budget = ReplayBudget(config.max_bytes, self._make_room)
        self._running: OrderedDict[S, None] = OrderedDict()
        """The running answers; the next one to lose its events comes first."""
        self._left: OrderedDict[S, None] = OrderedDict()
        """The running answers that have lost a reader, the earliest loss first; some may have a reader again."""
        self._ended: OrderedDict[S, None] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        return self._budget.num_bytes

    @property
    def num_unattended(self) -> int:
        """Running answers that no client reads."""
        return sum(not stream.is_attended for stream in self._running)

    def new_log(self, num_events: int = 0) -> EventLog:
        """`num_events` events were appended at another process, and are not kept in the new log."""
        return EventLog(self._config.max_response_bytes, self._budget, num_events)

    def add(self, stream: S) -> None:
        """Keep an answer that runs from now on."""
        self._running[stream] = None

    def on_ended(self, stream: S) -> None:
        """The answer is complete; it is kept as it is."""
        if stream in self._running:
            del self._running[stream]
            self._left.pop(stream, None)
            self._ended[stream] = None

    def on_left(self, stream: S) -> None:
        """The answer has lost its reader. Running answers without a reader occupy capacity: if there are too many,
        those that have been without one for the longest time are abandoned."""
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
        """The answer is no longer kept."""
        self._running.pop(stream, None)
        self._left.pop(stream, None)
        self._ended.pop(stream, None)

    def _make_room(self) -> None:
        """Evict the oldest answers first, and complete ones before running ones."""
        budget = self._budget
        while budget.num_bytes > budget.max_bytes and self._ended:
            stream, _ = self._ended.popitem(last=False)
            self._on_evicted()
            if stream.is_attended:
                stream.log.forget()  # its reader gets an error
            else:
                self._forget(stream)
        for _ in range(len(self._running)):
            if budget.num_bytes <= budget.max_bytes:
                return
            stream = next(iter(self._running))
            self._running.move_to_end(stream)
            self._on_evicted()
            stream.log.forget()
