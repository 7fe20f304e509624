"""An answer of `Generate` that outlives its RPC: its responses go to a log, and from there to whoever reads it now.

A client of the dispatcher like any other, but no task of its own: the log is what is bounded. It has at most one
reader; one that comes later takes over. While it has none the grace clock runs, whether or not the answer is complete;
when that ends, so does the answer.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable

from kvloom.errors import KvloomError, invalid_argument
from kvloom.replay.event_log import EventLog
from kvloom.replay.grace_timer import GraceTimer
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.router_service_pb2 import GenerateResponse
from router.answers.generate import deltas_of, error_of
from router.core.actions import FleetChanged
from router.core.frames import Start, Step

Write = Callable[[GenerateResponse], Awaitable[None]]


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerName:
    """What an answer is found by."""

    request_id: str
    token: str
    client_id: str
    """In the dispatcher."""


class Reader:
    """An RPC that reads an answer."""

    __slots__ = ("error", "position", "wake")

    def __init__(self, position: int) -> None:
        self.position = position
        """The last event that it may have."""
        self.error: KvloomError | None = None
        """Why it was broken off."""
        self.wake = asyncio.Event()

    def break_off(self, error: KvloomError) -> None:
        self.error = error
        self.wake.set()


class ResumableAnswer:
    """`on_left` is called when its reader has gone, `on_abandoned` when no client can or did come back in time,
    `on_ended` once, when nothing will be added to it."""

    def __init__(
        self,
        name: AnswerName,
        num_choices: int,
        log: EventLog,
        grace_seconds: float,
        on_left: Callable[[ResumableAnswer], None],
        on_abandoned: Callable[[ResumableAnswer], None],
        on_ended: Callable[[ResumableAnswer], None],
        *,
        has_news: bool = False,
    ) -> None:
        """The responses are numbered on from the last event of `log`. `has_news`: something of it was shown before, by
        another router."""
        self.name = name
        self.log = log
        self.known = False
        """A client may know how to resume it."""
        self.seed: int | None = None
        """Once the request was taken in."""
        self.first_start: Start | None = None
        self.ended = False
        self.error: KvloomError | None = None
        """The status that it ended with; None: OK."""
        self._num_open = num_choices
        self._clock = GraceTimer(grace_seconds, lambda: on_abandoned(self))
        self._on_left = on_left
        self._on_ended = on_ended
        self._reader: Reader | None = None
        self._num_before = log.num_events
        self._num_sent = log.num_events
        """The last event that a client may have that has gone."""
        self._has_news = has_news
        self._latest = GenerateResponse()

    @property
    def is_attended(self) -> bool:
        return self._reader is not None

    @property
    def is_heard(self) -> bool:
        """It has responses."""
        return self.log.num_events > self._num_before

    @property
    def num_unclaimed(self) -> int:
        """Events that no reader was sent."""
        return self.log.num_events - self._num_sent

    # -- ClientSink ---------------------------------------------------------------------------------------------------

    def send_step(self, step: Step) -> None:
        if self.ended:
            return
        self._num_open -= len(step.finishes)
        self._has_news = self._has_news or bool(step.slots)
        if step.starts and self.first_start is None:
            self.first_start = step.starts[0]
        error = error_of(step.finishes, self._has_news)
        deltas = deltas_of(step)
        if deltas and (error is None or step.slots):
            self._append(GenerateResponse(request_id=self.name.request_id, deltas=deltas))
        if error is not None or not self._num_open:
            self.end(error)

    def send_fleet(self, fleet: FleetChanged) -> None:
        """Of no interest to a single request."""

    def end(self, error: KvloomError | None) -> None:
        """Nothing more is added. Only the first end counts."""
        if self.ended:
            return
        self.ended = True
        self.error = error
        if self._reader is not None:
            self._reader.wake.set()
        self._on_ended(self)

    def _append(self, response: GenerateResponse) -> None:
        log = self.log
        response.event_number = log.num_events + 1
        if not self.is_heard:
            response.resume_token = self.name.token
            if self.seed is not None:
                response.seed = self.seed
        self._latest = response
        log.append(response.SerializeToString())
        reader = self._reader
        if reader is not None:
            reader.wake.set()
        if not log.holds(self._num_sent if reader is None else reader.position):
            # Nobody could be given a whole answer any more.
            if reader is not None:
                self._reader = None
                reader.break_off(self._gone(reader.position))
            self.abandon_soon()

    # -- readers ------------------------------------------------------------------------------------------------------

    def attach(self, after: int) -> Reader:
        """A new reader, from event `after` + 1 on; it has to `follow` then. Raises KvloomError (INVALID_ARGUMENT,
        EVENTS_GONE), and then nothing has changed."""
        if after > self.log.num_events:
            message = f"The answer has no response {after} yet; the latest is {self.log.num_events}."
            raise invalid_argument(message, "starting_after")
        if not self.log.holds(after):
            raise self._gone(after)
        self._clock.stop()
        previous, self._reader = self._reader, Reader(after)
        if previous is not None:
            self._num_sent = max(self._num_sent, previous.position)
            message = "Another call has taken this stream over."
            previous.break_off(KvloomError(ErrorReason.ERROR_REASON_STREAM_TAKEN_OVER, message))
        return self._reader

    async def follow(self, reader: Reader, write: Write) -> None:
        """Write what an attached reader has missed and then what comes, until the end. Raises KvloomError: the error
        that the answer ended with, or why this reader was broken off."""
        log = self.log
        while reader.error is None:
            if reader.position < log.num_events:
                if not log.holds(reader.position):
                    raise self._gone(reader.position)
                response = self._response(reader.position)
                reader.position += 1
                await write(response)
            elif self.ended:
                break
            else:
                reader.wake.clear()
                await reader.wake.wait()
        error = reader.error or self.error
        if error is not None:
            raise error.with_traceback(None)

    def detach(self, reader: Reader) -> None:
        """Its RPC is over, however that came."""
        self._num_sent = max(self._num_sent, reader.position)
        if self._reader is not reader:
            return
        self._reader = None
        if self.known and self.log.holds(self._num_sent):
            self._clock.start()
        else:
            self.abandon_soon()
        self._on_left(self)

    def _response(self, position: int) -> GenerateResponse:
        """The one behind event `position`."""
        if position + 1 == self.log.num_events:
            return self._latest
        (kept,) = self.log.read(position, 1)
        return GenerateResponse.FromString(kept)

    def _gone(self, after: int) -> KvloomError:
        message = (
            f"Responses {after + 1} to {self.log.num_forgotten} of this answer are no longer kept; "
            "it cannot be resumed from there."
        )
        return KvloomError(ErrorReason.ERROR_REASON_EVENTS_GONE, message)

    # -- nobody reads -------------------------------------------------------------------------------------------------

    def abandon_soon(self) -> None:
        """End and forget it; not at once, for the caller may be in the middle of an event."""
        self._clock.expire_soon()

    def close(self) -> None:
        """Forget everything."""
        self._clock.close()
        self.log.close()
        reader, self._reader = self._reader, None
        if reader is not None and reader.position < self.log.num_events:
            reader.break_off(self._gone(reader.position))
