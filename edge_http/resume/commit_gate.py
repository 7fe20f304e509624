"""Output commit: an event of a resumable stream is shown once the journal has it, so that no client is ahead of what
another edge could continue from.

Redis must not delay streams: if it does not accept what is new within `commit_seconds`, events are shown as they come,
until Redis keeps up again. If the edge of a stream dies meanwhile, another edge can resume the stream only as far as
the journal goes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

STALL_SECONDS: Final = 0.05
"""A timer that fires later than that shows that this process stood still, not that Redis is slow."""


class Committed(Protocol):
    """The publication of a stream, as the gate uses it."""

    is_noted: bool
    """It waits to be taken; only the gate changes this."""
    num_published: int
    """The number of the last event that the journal has."""

    @property
    def num_events(self) -> int: ...

    def release(self, up_to: int) -> None:
        """Events up to that number may be shown."""
        ...


P = TypeVar("P", bound=Committed)


class CommitGate(Generic[P]):
    """Stands between the streams of an edge and its publisher, which takes the noted publications, writes them, and
    reports the outcome."""

    __slots__ = (
        "_commit_seconds",
        "_holds_for_good",
        "_loop",
        "_noted",
        "_taken_at",
        "_timer",
        "_timer_at",
        "_writing",
        "holds",
        "wake",
    )

    def __init__(self, commit_seconds: float) -> None:
        self._commit_seconds = commit_seconds
        self._loop = asyncio.get_running_loop()
        self._noted: list[P] = []
        self._writing: list[P] = []
        self._taken_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._holds_for_good = False
        self.holds = True
        """Events wait for their release."""
        self.wake = asyncio.Event()
        """Set while any publication is noted."""

    def note(self, publication: P) -> None:
        """It has something that the journal does not have."""
        publication.is_noted = True
        self._noted.append(publication)
        self.wake.set()
        if self.holds and self._timer is None:
            self._start_timer()

    def take(self) -> list[P]:
        """Take all noted publications. The caller writes them next and then calls `commit` or `fail`."""
        self._writing, self._noted = self._noted, []
        self._taken_at = self._loop.time()
        self.wake.clear()
        for publication in self._writing:
            publication.is_noted = False
        return self._writing

    def commit(self) -> None:
        """The journal has what was taken, up to the `num_published` of each publication."""
        self._stop_timer()
        if self._commit_seconds and self._loop.time() - self._taken_at < self._commit_seconds:
            self.holds = True
            if self._noted:
                self._start_timer()
        writing, self._writing = self._writing, []
        for publication in writing:
            publication.release(publication.num_published)

    def fail(self) -> None:
        """Takes back what could not be written. It is noted again, and no event waits for it."""
        writing, self._writing = self._writing, []
        for publication in writing:
            if not publication.is_noted:
                self.note(publication)
        self._open()

    def hold(self) -> None:
        """From now on no event is shown before it is committed, however long that takes; until `fail` or `close`."""
        self._stop_timer()
        self._holds_for_good = self.holds = self._commit_seconds > 0

    def close(self) -> None:
        """No event is held back any more."""
        self._commit_seconds = 0.0
        self._open()

    def _open(self) -> None:
        self._stop_timer()
        self.holds = self._holds_for_good = False
        for publication in [*self._writing, *self._noted]:
            publication.release(publication.num_events)

    def _start_timer(self) -> None:
        if self._holds_for_good:
            return
        self._timer_at = self._loop.time() + self._commit_seconds
        self._timer = self._loop.call_at(self._timer_at, self._on_late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_late(self) -> None:
        if self._loop.time() > self._timer_at + STALL_SECONDS:
            # The process stood still: Redis may have answered, or another edge may have taken over, unseen.
            self._start_timer()
        else:
            self._timer = None
            self._open()


class _Publication(Committed, Protocol):
    fresh: list[bytes]
    """Prefix and payload of the latest events."""


class CommitCursor:
    """The events of one response between its log and its live reader: those behind `num_released` are held until the
    commit gate releases them."""

    __slots__ = ("_gate", "_has_begun", "_held", "_publication", "is_shown", "num_released")

    def __init__(self, gate: CommitGate[Any], publication: _Publication) -> None:
        self._gate = gate
        self._publication = publication
        self._held: list[bytes] = []
        """The last events of the log, which the live reader has to wait for; empty without a live reader."""
        self._has_begun = False
        self.is_shown = False
        """Clients may know that there is an answer."""
        self.num_released = publication.num_published
        """The number of the last event that may be shown."""
        self._note()

    @property
    def has_held_events(self) -> bool:
        return bool(self._held)

    def begin(self) -> bool:
        """The answer has begun. Returns whether that may be shown yet."""
        self._has_begun = True
        self.is_shown = self._note()
        return self.is_shown

    def add(self, number: int, prefix: bytes, payload: bytes, event: bytes, has_live_reader: bool) -> bool:
        """Event `number` was appended to the log. Returns whether it is held back from the live reader."""
        publication, gate = self._publication, self._gate
        if not publication.is_noted:
            gate.note(publication)
        if gate.holds:
            publication.fresh += (prefix, payload)
            if has_live_reader:
                self._held.append(event)
            return has_live_reader
        if self._held:  # of a stream that was taken over from another edge and is not in the journal yet
            self._held.append(event)
            return True
        self.num_released = number
        return False

    def end(self) -> bool:
        """The answer has ended. Returns whether that may be shown yet."""
        return self._note() and not self._held

    def hold(self, events: Sequence[bytes]) -> None:
        """Replace the held events by those that a new live reader has to wait for."""
        self._held = list(events)

    def release(self, up_to: int, num_events: int) -> list[bytes]:
        """Events up to that number, of `num_events`, may be shown. Returns those that were held."""
        self.is_shown = self._has_begun
        if up_to > self.num_released:
            self.num_released = up_to
        held = self._held
        if self.num_released >= num_events:
            self._held = []
            return held
        num_shown = max(0, self.num_released - num_events + len(held))
        self._held = held[num_shown:]
        return held[:num_shown]

    def _note(self) -> bool:
        """Something has happened that the journal does not have. Returns whether it may be shown nevertheless."""
        if not self._publication.is_noted:
            self._gate.note(self._publication)
        return not self._gate.holds
