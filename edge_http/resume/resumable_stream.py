"""A streamed answer that outlives its connection: it is written to a log, and from there to whoever reads it now.

With a commit gate (edge_http/resume/commit_gate.py) readers see an event once another edge could go on from it.

It has at most one reader. One that comes later takes over. While it has none, a timer runs; when that ends, so does
the response. One rule for all cases: a client has `grace_seconds` from the moment its connection was lost, whether or
not the answer is complete by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from aiohttp.abc import AbstractStreamWriter

from edge_http.resume.commit_gate import CommitGate
from edge_http.resume.reader import Reader
from edge_http.resume.response_name import ResponseName
from edge_http.wire.sse import EventStream
from kvloom.errors import KvloomError, invalid_argument
from kvloom.replay.event_log import EventLog
from kvloom.replay.grace_timer import GraceTimer
from kvloom.v1.error_reason_pb2 import ErrorReason

CATCH_UP_BYTES: Final = 64 * 2**10
"""Replayed at once; then the reader has to take it before there is more."""
CATCH_UP_SECONDS: Final = 30.0
"""How long a reader may take for that much."""


class ResumableStream:
    """An EventSink that remembers. `on_left` is called when its reader has gone, `on_abandoned` when no client can or
    did come back in time."""

    __slots__ = (
        "_clock",
        "_gate",
        "_headers",
        "_held",
        "_is_shown",
        "_live",
        "_num_sent",
        "_on_left",
        "_on_slow_reader",
        "_position",
        "_reader",
        "begun",
        "ended",
        "error",
        "fresh",
        "is_noted",
        "log",
        "name",
        "num_published",
        "num_released",
    )

    def __init__(
        self,
        name: ResponseName,
        log: EventLog,
        grace_seconds: float,
        on_left: Callable[[ResumableStream], None],
        on_abandoned: Callable[[ResumableStream], None],
        on_slow_reader: Callable[[], None],
        gate: CommitGate[ResumableStream] | None = None,
    ) -> None:
        """`gate`: says which events may be shown; None: all."""
        self.name = name
        self.log = log
        self._clock = GraceTimer(grace_seconds, lambda: on_abandoned(self))
        self._on_left = on_left
        self._on_slow_reader = on_slow_reader
        self._headers: Mapping[str, str] = {}
        self._reader: Reader | None = None
        self._live: EventStream | None = None
        """The reader's connection, once it has caught up."""
        self._num_sent = 0
        """The last event that any reader may have."""
        self.begun = False
        self.ended = False
        self.error: KvloomError | None = None
        """Why it was refused: it ended before it began."""
        self._gate = gate
        self._held: list[bytes] = []
        """Events that the live reader has to wait for."""
        self._position = 0
        """The last event that the live reader has; kept with a gate only."""
        self._is_shown = gate is None
        """That there is an answer may be known."""
        self.num_released = log.num_events
        """The last event that may be shown; kept with a gate only."""
        self.is_noted = False
        """The gate's."""
        self.num_published = log.num_events
        """The last event that the journal has; the publisher's."""
        self.fresh: list[bytes] = []
        """The publisher's: prefix and payload of the latest events, as long as it keeps up."""

    @property
    def is_attended(self) -> bool:
        return self._reader is not None

    @property
    def num_unclaimed(self) -> int:
        """Events that no reader was sent."""
        return self.log.num_events - self._num_sent

    # --- EventSink

    @property
    def num_events(self) -> int:
        return self.log.num_events

    def begin(self, headers: Mapping[str, str]) -> None:
        self.begun = True
        self._headers = headers
        if not self._waits():
            self._is_shown = True
            if self._live is not None:
                self._live.begin(headers)

    def send(self, prefix: bytes, payload: bytes, suffix: bytes) -> bool:
        """Always True: a reader that is too slow loses its connection, not its answer."""
        log = self.log
        event = b"id: %d\ndata: %b%b%b\n\n" % (log.num_events + 1, prefix, payload, suffix)
        framed = b"%x\r\n%b\r\n" % (len(event), event)
        log.append(framed)
        live = self._live
        gate = self._gate
        if gate is not None:
            if not self.is_noted:
                gate.note(self)
            if gate.holds:
                self.fresh += (prefix, payload)
                if live is not None:
                    self._held.append(framed)
                    return True
            elif self._held:  # of a stream that was taken over from another edge, and is not in the journal yet
                self._held.append(framed)
                return True
            else:
                self.num_released = self._position = log.num_events
        if live is None:
            if self._reader is None and not log.holds(self._num_sent):
                self.abandon_soon()  # nobody could be given a whole answer any more
        elif not live.write_framed(framed):
            self._cut_off_slow_reader()
        return True

    def fast_writer(self, prefix: bytes, suffix: bytes, on_slow_reader: Callable[[], None]) -> None:  # noqa: ARG002
        """Each event is written to the log."""
        return

    def cork(self) -> None:
        if self._live is not None:
            self._live.cork()

    def end(self) -> None:
        self.ended = True
        if not self._waits() and not self._held:
            self._finish_reader()

    def _waits(self) -> bool:
        """What has just happened may not be shown yet."""
        gate = self._gate
        if gate is None:
            return False
        if not self.is_noted:
            gate.note(self)
        return gate.holds

    def _finish_reader(self) -> None:
        if self._live is not None and self._reader is not None:
            self._live.end()
            self._reader.finish()

    def break_off(self, last_payload: bytes, linger_seconds: float) -> None:  # noqa: ARG002
        self.send(b"", last_payload, b"")
        self.end()

    # --- the gate

    def release(self, up_to: int) -> None:
        """Events up to that number may be shown."""
        self.num_released = max(self.num_released, up_to)
        if not self.begun:
            return
        self._is_shown = True
        live = self._live
        if live is None:
            return
        if not live.begun:
            live.begin(self._headers)
        num_shown = max(0, self.num_released - self._position)
        shown = self._held[:num_shown]
        del self._held[:num_shown]
        if len(shown) > 1:
            live.cork()
        for framed in shown:
            if not live.write_framed(framed):
                self._cut_off_slow_reader()
                return
            self._position += 1
        if self.ended and not self._held:
            self._finish_reader()

    # --- readers

    def refuse(self, error: KvloomError) -> None:
        """It ended before it began: its readers get the error, with its HTTP status."""
        self.error = error
        self.ended = True
        if self._reader is not None:
            self._reader.finish()

    def attach(self, reader: Reader, after: int) -> None:
        """Make `reader` the one that reads, from event `after` + 1 on; it then has to `follow`. Raises KvloomError
        (INVALID_ARGUMENT, EVENTS_GONE), and then nothing has changed."""
        if after > self.log.num_events:
            message = f"The response has no event {after} yet; the latest is {self.log.num_events}."
            raise invalid_argument(message, "starting_after")
        self._check_holds(after)
        self._clock.stop()
        previous = self._reader
        self._leave_live()
        self._reader = reader
        if previous is not None:
            message = "Another connection has taken this stream over."
            previous.break_off(KvloomError(ErrorReason.ERROR_REASON_STREAM_TAKEN_OVER, message))

    async def follow(self, reader: Reader, after: int, writer: AbstractStreamWriter) -> None:
        """Write to an attached reader what it missed and then what comes, until it is over. Raises KvloomError when
        nothing was written."""
        try:
            if self.begun and self._is_shown:
                reader.events.begin(self._headers)
                after = await self._catch_up(reader, after, writer)
            if self._reader is reader:
                self._go_live(reader, after)
            await reader.over
        finally:
            self._detach(reader)
        error = reader.error or self.error
        if error is not None and not reader.events.begun:
            raise error.with_traceback(None)

    def _go_live(self, reader: Reader, after: int) -> None:
        """It has what may be shown, or nothing yet."""
        try:
            self._check_holds(after)
        except KvloomError as error:
            self._reader = None
            reader.break_off(error)
            return
        self._live = reader.events
        self._position = after
        self._held = list(self.log.read_all(after))
        if self.ended and not self._held:
            self._finish_reader()

    async def _catch_up(self, reader: Reader, after: int, writer: AbstractStreamWriter) -> int:
        """Returns the last event that it has, without having awaited anything since it looked whether there is more."""
        position = after
        try:
            while self._reader is reader and position < self._num_visible:
                self._check_holds(position)
                missed = self.log.read(position, CATCH_UP_BYTES)[: self._num_visible - position]
                reader.events.write_all_framed(missed)
                position += len(missed)
                reader.num_replayed += len(missed)
                self._num_sent = max(self._num_sent, position)
                async with asyncio.timeout(CATCH_UP_SECONDS):
                    await writer.drain()
        except TimeoutError:
            if self._reader is reader:  # not one that has taken over meanwhile
                self._cut_off_slow_reader()
        except KvloomError as error:
            self._reader = None
            reader.break_off(error)
        return position

    @property
    def _num_visible(self) -> int:
        return self.log.num_events if self._gate is None else self.num_released

    def _check_holds(self, after: int) -> None:
        if not self.log.holds(after):
            message = (
                f"Events {after + 1} to {self.log.num_forgotten} of this response are no longer kept; "
                "it cannot be resumed from there."
            )
            raise KvloomError(ErrorReason.ERROR_REASON_EVENTS_GONE, message)

    def _detach(self, reader: Reader) -> None:
        if self._live is reader.events:
            self._num_sent = self.log.num_events if self._gate is None else self._position
        if self._reader is reader or self._reader is None:
            self._leave_live()
            self._start_clock()
            self._on_left(self)

    def _leave_live(self) -> None:
        self._reader = self._live = None
        self._held = []

    def _cut_off_slow_reader(self) -> None:
        reader = self._reader
        if reader is None:
            return
        if self._live is not None:
            self._num_sent = self.log.num_events - 1 if self._gate is None else self._position
        self._leave_live()
        self._on_slow_reader()
        message = "The connection was closed because the client reads it too slowly. The stream can be resumed."
        reader.break_off(KvloomError(ErrorReason.ERROR_REASON_CLIENT_TOO_SLOW, message))

    def break_reader_off(self, error: KvloomError) -> None:
        """The stream goes on elsewhere, if at all."""
        reader = self._reader
        if reader is not None:
            self._leave_live()
            reader.break_off(error)

    # --- nobody reads

    def await_reader(self) -> None:
        """Somebody is expected to attach."""
        self._clock.start()

    def _start_clock(self) -> None:
        if not self.begun and not self.name.idempotency_key:
            # No client has learned the id.
            self.abandon_soon()
        else:
            self._clock.start()

    def abandon_soon(self) -> None:
        """End and forget it; not at once, for the caller may be in the middle of an event."""
        self._clock.expire_soon()

    def close(self) -> None:
        """Forget everything."""
        self._clock.close()
        self.log.close()
        if self._reader is not None:
            message = "The response is no longer kept."
            self._reader.break_off(KvloomError(ErrorReason.ERROR_REASON_EVENTS_GONE, message))
