"""Output commit: an event of a resumable stream is shown once the journal has it, so that no client is ahead of what
another edge could go on from.

Redis must not hold streams up: when it does not take what is new within `commit_seconds`, events are shown as they
come, until it does again. A stream whose edge dies meanwhile can be resumed elsewhere only as far as the journal goes.
"""

from __future__ import annotations

import asyncio
from typing import Final, Generic, Protocol, TypeVar

STALL_SECONDS: Final = 0.05
"""A timer that fires later than that says that this process stood still, not that Redis is slow."""


class Committed(Protocol):
    """A stream, as the gate sees it."""

    is_noted: bool
    """It waits to be taken."""
    num_published: int
    """Its last event that the journal has."""

    @property
    def num_events(self) -> int: ...

    def release(self, up_to: int) -> None:
        """Events up to that number may be shown."""
        ...


S = TypeVar("S", bound=Committed)


class CommitGate(Generic[S]):
    """Between the streams of an edge and its publisher, which takes what is noted, writes it, and says so."""

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
        """0: nothing is held back."""
        self._commit_seconds = commit_seconds
        self._loop = asyncio.get_running_loop()
        self._noted: list[S] = []
        self._writing: list[S] = []
        self._taken_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._holds_for_good = False
        self.holds = commit_seconds > 0
        """Events wait for their release."""
        self.wake = asyncio.Event()
        """Set while something is noted."""

    def note(self, stream: S) -> None:
        """It has news that the journal has not."""
        stream.is_noted = True
        self._noted.append(stream)
        self.wake.set()
        if self.holds and self._timer is None:
            self._start_timer()

    def take(self) -> list[S]:
        """All that are noted. Their news is written next, and then `commit` or `fail` is called."""
        self._writing, self._noted = self._noted, []
        self._taken_at = self._loop.time()
        self.wake.clear()
        for stream in self._writing:
            stream.is_noted = False
        return self._writing

    def commit(self) -> None:
        """The journal has what was taken, up to each stream's `num_published`."""
        self._stop_timer()
        if self._commit_seconds and self._loop.time() - self._taken_at < self._commit_seconds:
            self.holds = True
            if self._noted:
                self._start_timer()
        writing, self._writing = self._writing, []
        for stream in writing:
            stream.release(stream.num_published)

    def fail(self) -> None:
        """It could not be written. It is noted again, and nothing waits for it."""
        writing, self._writing = self._writing, []
        for stream in writing:
            if not stream.is_noted:
                self.note(stream)
        self._open()

    def hold(self) -> None:
        """From now on nothing is shown before it is committed, however long that takes; until `fail` or `close`."""
        self._stop_timer()
        self._holds_for_good = self.holds = self._commit_seconds > 0

    def close(self) -> None:
        """Nothing is held back any more."""
        self._commit_seconds = 0.0
        self._open()

    def _open(self) -> None:
        self._stop_timer()
        self.holds = self._holds_for_good = False
        for stream in [*self._writing, *self._noted]:
            stream.release(stream.num_events)

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
            self._start_timer()  # what Redis has answered, or another edge has taken over, is not known yet
        else:
            self._timer = None
            self._open()
