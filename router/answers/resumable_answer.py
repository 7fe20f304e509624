"""An answer of `Generate` that outlives its RPC: its responses go to a log, and from there to its current reader.

It is a client of the dispatcher like any other, but without a task of its own: only the log is bounded. Which RPC
reads, and how long the answer waits for a reader, is up to the reader slot (kvloom_common/replay/reader_slot.py).
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Final

from kvloom.errors import KvloomError
from kvloom.guide import GUIDE_FIELD
from kvloom.v1.router_service_pb2 import GenerateResponse
from kvloom_common.replay.event_log import EventLog
from kvloom_common.replay.reader_slot import Nouns, ReaderSlot
from router.answers.generate import deltas_of, error_of
from router.core.actions import FleetChanged
from router.core.frames import Start, Step
from router.parsed_output import ParsedOutput

Write = Callable[[GenerateResponse], Awaitable[None]]
_NOUNS: Final = Nouns("response", "answer", "call")


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerName:
    """Identifies an answer."""

    key: str
    """Identifies it among all callers' answers (router/answers/named_calls.py)."""
    request_id: str
    token: str
    client_id: str
    """Identifies it in the dispatcher."""


class RpcReader:
    """An RPC that reads an answer."""

    __slots__ = ("error", "position", "wake")

    def __init__(self, position: int) -> None:
        self.position = position
        """The number of the last event that the client may have."""
        self.error: KvloomError | None = None
        """Why it was broken off."""
        self.wake = asyncio.Event()

    def break_off(self, error: KvloomError) -> None:
        self.error = error
        self.wake.set()


class ResumableAnswer:
    """`on_left` is called when its reader has gone, `on_abandoned` when no client can come back, or none did in time,
    `on_ended` once, when no response will be added any more."""

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
        has_output: bool = False,
    ) -> None:
        """The responses are numbered on from the last event of `log`. With `has_output`, another router has shown a
        part of the answer before."""
        self.name = name
        self.log = log
        self.is_known_to_client = False
        """A client may know how to resume it."""
        self.seed: int | None = None
        self.chosen_model = ""
        """The model that a route has chosen."""
        """Known once the request was admitted, like the next two."""
        self.output: ParsedOutput | None = None
        """None: the output is text."""
        self.guide_field = GUIDE_FIELD
        self.first_start: Start | None = None
        self.ended = False
        self.error: KvloomError | None = None
        """The status that it ended with; None for OK."""
        self._num_open = num_choices
        self._slot: ReaderSlot[RpcReader] = ReaderSlot(log, grace_seconds, lambda: on_abandoned(self), _NOUNS)
        self._on_left = on_left
        self._on_ended = on_ended
        self._num_before = log.num_events
        self._has_output = has_output
        self._latest = GenerateResponse()

    @property
    def is_attended(self) -> bool:
        return self._slot.reader is not None

    @property
    def has_responses(self) -> bool:
        return self.log.num_events > self._num_before

    @property
    def num_unclaimed(self) -> int:
        """The number of events that were sent to no reader."""
        return self.log.num_events - self._slot.num_sent

    # -- ClientSink ---------------------------------------------------------------------------------------------------

    def send_step(self, step: Step) -> None:
        if self.ended:
            return
        self._num_open -= len(step.finishes)
        self._has_output = self._has_output or bool(step.slots)
        if step.starts and self.first_start is None:
            self.first_start = step.starts[0]
        error = error_of(step.finishes, self._has_output, self.guide_field)
        deltas = deltas_of(step)
        if deltas and (error is None or step.slots):
            if self.output is not None:
                self.output.parse(deltas)
            self._append(GenerateResponse(request_id=self.name.request_id, deltas=deltas))
        if error is not None or not self._num_open:
            self.end(error)

    def send_fleet(self, fleet: FleetChanged) -> None:
        """A single request does not depend on the fleet."""

    def end(self, error: KvloomError | None) -> None:
        """No response is added from now on. Only the first end counts."""
        if self.ended:
            return
        self.ended = True
        self.error = error
        if self._slot.reader is not None:
            self._slot.reader.wake.set()
        self._on_ended(self)

    def _append(self, response: GenerateResponse) -> None:
        log = self.log
        response.event_number = log.num_events + 1
        if not self.has_responses:
            response.resume_token = self.name.token
            if self.seed is not None:
                response.seed = self.seed
            response.model = self.chosen_model
        self._latest = response
        log.append(response.SerializeToString())
        slot, reader = self._slot, self._slot.reader
        if reader is not None:
            reader.wake.set()
        if not log.holds(slot.num_sent if reader is None else reader.position):
            # No client could get a whole answer any more.
            if reader is not None:
                slot.break_off(slot.events_gone(reader.position), is_resumable=False)
            else:
                slot.abandon_soon()

    # -- readers ------------------------------------------------------------------------------------------------------

    def attach(self, after: int) -> RpcReader:
        """Returns a new reader, from event `after` + 1 on; the caller then has to `follow` with it. Raises KvloomError
        (INVALID_ARGUMENT, EVENTS_GONE), and then nothing has changed."""
        reader = RpcReader(after)
        self._slot.attach(reader)
        return reader

    async def follow(self, reader: RpcReader, write: Write) -> None:
        """Write the responses that an attached reader has missed and then new ones, until the end. Raises KvloomError:
        the error that the answer ended with, or the reason why this reader was broken off."""
        log = self.log
        while reader.error is None:
            if reader.position < log.num_events:
                self._slot.check_kept(reader.position)
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

    def detach(self, reader: RpcReader) -> None:
        """The reader's RPC is over, for whatever reason."""
        is_resumable = self.is_known_to_client and self.log.holds(max(self._slot.num_sent, reader.position))
        if self._slot.detach(reader, is_resumable=is_resumable):
            self._on_left(self)

    def _response(self, position: int) -> GenerateResponse:
        """The response with number `position` + 1."""
        if position + 1 == self.log.num_events:
            return self._latest
        (kept,) = self.log.read(position, 1)
        return GenerateResponse.FromString(kept)

    # -- no reader ----------------------------------------------------------------------------------------------------

    def abandon_soon(self) -> None:
        """End and forget it in the next turn of the event loop: the caller may be in the middle of an event."""
        self._slot.abandon_soon()

    def close(self) -> None:
        """Forget everything."""
        reader = self._slot.close()
        self.log.close()
        if reader is not None and reader.position < self.log.num_events:
            reader.break_off(self._slot.events_gone(reader.position))
