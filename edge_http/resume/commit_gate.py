"""Output commit: an event of a resumable stream is shown once the journal has it, so that no client is ahead of what
another edge could continue from.

Redis must not delay streams: if it does not accept what is new within `commit_seconds`, events are shown as they come,
until Redis keeps up again. If the edge of a stream dies meanwhile, another edge can resume the stream only as far as
the journal goes.
"""

from __future__ import annotations

import asyncio
from typing import Final, Generic, Protocol, TypeVar

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
        """With 0 no event is held back."""
        self._commit_seconds = commit_seconds
        self._loop = asyncio.get_running_loop()
        self._noted: list[P] = []
        self._writing: list[P] = []
        self._taken_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._holds_for_good = False
        self.holds = commit_seconds > 0
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
        """What was taken could not be written. It is noted again, and no event waits for it."""
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
