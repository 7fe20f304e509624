"""The one reader of a resumable answer, and the time that the answer waits for its next one.

An answer has at most one reader. A later one takes over. While there is none, a timer runs, and when it expires so does
the answer. One rule covers all cases: a client has the grace period from the moment its connection was lost, whether or
not the answer is complete by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

from kvloom.errors import KvloomError, invalid_argument
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.replay.event_log import EventLog


class GraceTimer:
    """Runs while an answer has no reader, and calls `on_expired` from the event loop when it expires."""

    __slots__ = ("_on_expired", "_seconds", "_timer")

    def __init__(self, seconds: float, on_expired: Callable[[], None]) -> None:
        self._seconds = seconds
        self._on_expired = on_expired
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start from the full duration, also when it already runs."""
        self._run(self._seconds)

    def expire_soon(self) -> None:
        """Expire in the next turn of the event loop: the caller may be in the middle of an event."""
        self._run(0)

    def lengthen(self, seconds: float) -> None:
        """Run for that long from now on; if it runs, from its full new duration."""
        self._seconds = seconds
        if self._timer is not None:
            self.start()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        """Stop for good, and release the callback. Its owner most likely holds this timer: the cycle would keep both
        alive until the garbage collector runs."""
        self.stop()
        self._on_expired = _do_nothing

    def _run(self, seconds: float) -> None:
        self.stop()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._expire)

    def _expire(self) -> None:
        self._timer = None
        self._on_expired()


def _do_nothing() -> None:
    """A closed timer notifies no owner."""


class Nouns(NamedTuple):
    """Error messages call the parts of an answer by these words."""

    event: str
    answer: str
    reader: str


class Reader(Protocol):
    @property
    def position(self) -> int:
        """The number of the last event that its client may have."""
        ...

    def break_off(self, error: KvloomError) -> None:
        """End it before the answer does, with `error`."""
        ...


R = TypeVar("R", bound=Reader)


class ReaderSlot(Generic[R]):
    """Holds the reader of one answer. The event loop calls `on_abandoned` when no client can come back, or none did in
    time."""

    __slots__ = ("_log", "_nouns", "_timer", "num_sent", "reader")

    def __init__(self, log: EventLog, grace_seconds: float, on_abandoned: Callable[[], None], nouns: Nouns) -> None:
        self._log = log
        self._nouns = nouns
        self._timer = GraceTimer(grace_seconds, on_abandoned)
        self.reader: R | None = None
        self.num_sent = log.num_events
        """The number of the last event that any former reader may have."""

    def attach(self, reader: R) -> None:
        """Let `reader` read from the event behind its position on; a reader that is attached is broken off. Raises
        KvloomError (INVALID_ARGUMENT, EVENTS_GONE), and then nothing has changed."""
        event, answer, noun = self._nouns
        if reader.position > self._log.num_events:
            message = f"The {answer} has no {event} {reader.position} yet; the latest is {self._log.num_events}."
            raise invalid_argument(message, "starting_after")
        self.check_kept(reader.position)
        self._timer.stop()
        previous, self.reader = self.reader, reader
        if previous is not None:
            self._note_sent(previous)
            message = f"Another {noun} has taken this stream over."
            previous.break_off(KvloomError(ErrorReason.ERROR_REASON_STREAM_TAKEN_OVER, message))

    def detach(self, reader: R, *, is_resumable: bool) -> bool:
        """The reader is gone; the grace period starts if its client can come back. Returns False if the reader was
        taken over or broken off before."""
        self._note_sent(reader)
        if self.reader is not reader:
            return False
        self._vacate(is_resumable)
        return True

    def break_off(self, error: KvloomError, *, is_resumable: bool) -> None:
        """Detach the reader, if there is one, and end it with `error`. What it missed is still in the log."""
        reader = self.reader
        if reader is not None:
            self._note_sent(reader)
            self._vacate(is_resumable)
            reader.break_off(error)

    def check_kept(self, after: int) -> None:
        """Raises KvloomError (EVENTS_GONE) unless all events behind that number are still in the log."""
        if not self._log.holds(after):
            raise self.events_gone(after)

    def events_gone(self, after: int) -> KvloomError:
        event, answer, _ = self._nouns
        message = (
            f"{event.capitalize()}s {after + 1} to {self._log.num_forgotten} of this {answer} are no longer kept; "
            "it cannot be resumed from there."
        )
        return KvloomError(ErrorReason.ERROR_REASON_EVENTS_GONE, message)

    def await_reader(self) -> None:
        """Start the grace period of an answer whose client is expected to come back."""
        self._timer.start()

    def wait_for(self, seconds: float) -> None:
        """From now on wait that long for a reader, also if the answer is waiting for one."""
        self._timer.lengthen(seconds)

    def abandon_soon(self) -> None:
        """Abandon the answer in the next turn of the event loop: the caller may be in the middle of an event."""
        self._timer.expire_soon()

    def close(self) -> R | None:
        """The answer is no longer kept: stop the timer for good. Returns the reader that was attached."""
        self._timer.close()
        reader, self.reader = self.reader, None
        return reader

    def _note_sent(self, reader: R) -> None:
        self.num_sent = max(self.num_sent, reader.position)

    def _vacate(self, is_resumable: bool) -> None:
        self.reader = None
        if is_resumable:
            self._timer.start()
        else:
            self._timer.expire_soon()
