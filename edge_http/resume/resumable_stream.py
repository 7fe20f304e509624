"""A streamed answer that outlives its connection: its events go to a log, and from there to its current reader.

With a commit gate (edge_http/resume/commit_gate.py) readers see an event once another edge could continue from it. Who
reads, and how long the answer waits for a reader, is up to the reader slot (kvloom_common/replay/reader_slot.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from aiohttp.abc import AbstractStreamWriter

from edge_http.formatting.error_formats import OPENAI_ERRORS, ErrorFormat
from edge_http.resume.commit_gate import CommitCursor
from edge_http.resume.response_name import ResponseName
from edge_http.wire.sse import EventStream
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.replay.event_log import EventLog
from kvloom_common.replay.reader_slot import Nouns, ReaderSlot

CATCH_UP_BYTES: Final = 64 * 2**10
"""How much is replayed at once; the reader has to take it before more is replayed."""
CATCH_UP_SECONDS: Final = 30.0
"""How long a reader may take for that much."""
LINGER_SECONDS: Final = 5.0
"""How long a connection that was broken off may take to read what was written."""
_NOUNS: Final = Nouns("event", "response", "connection")


class ConnectionReader:
    """A connection that reads a response which outlives it."""

    __slots__ = ("_error_format", "error", "events", "num_replayed", "over")

    def __init__(self, events: EventStream, error_format: ErrorFormat = OPENAI_ERRORS) -> None:
        """`events` is numbered on from the last event that the client has."""
        self._error_format = error_format
        self.events = events
        self.error: KvloomError | None = None
        """Why it was broken off."""
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when nothing more will be written to it."""
        self.num_replayed = 0

    @property
    def position(self) -> int:
        """The number of the last event that the client may have."""
        return self.events.num_events

    def finish(self) -> None:
        if not self.over.done():
            self.over.set_result(None)

    def break_off(self, error: KvloomError) -> None:
        """End it before the answer does. The events that it misses are still in the log."""
        if self.over.done():
            return
        self.error = error
        if self.events.has_begun:
            self.events.break_off(self._error_format.event(error, self.position), LINGER_SECONDS)
        self.finish()


class ResumableStream:
    """An EventSink that keeps its events. `on_left` is called when its reader has gone, `on_abandoned` when no client
    can come back, or none did in time."""

    __slots__ = (
        "_headers",
        "_live",
        "_on_left",
        "_on_slow_reader",
        "_slot",
        "commit",
        "ended",
        "error",
        "has_begun",
        "has_failed",
        "log",
        "name",
    )

    def __init__(
        self,
        name: ResponseName,
        log: EventLog,
        grace_seconds: float,
        on_left: Callable[[ResumableStream], None],
        on_abandoned: Callable[[ResumableStream], None],
        on_slow_reader: Callable[[], None],
    ) -> None:
        self.name = name
        self.log = log
        self.commit: CommitCursor | None = None
        """Set for a stream that has a journal; without it every event may be shown at once."""
        self._slot: ReaderSlot[ConnectionReader] = ReaderSlot(log, grace_seconds, lambda: on_abandoned(self), _NOUNS)
        self._on_left = on_left
        self._on_slow_reader = on_slow_reader
        self._headers: Mapping[str, str] = {}
        self._live: EventStream | None = None
        """The reader's connection, once it has caught up."""
        self.has_begun = False
        self.has_failed = False
        """The answer ended with an error, which is its last event, or why it was refused."""
        self.ended = False
        self.error: KvloomError | None = None
        """Why it was refused: it ended before it began."""

    @property
    def is_attended(self) -> bool:
        return self._slot.reader is not None

    @property
    def num_unclaimed(self) -> int:
        """The number of events that were sent to no reader."""
        return self.log.num_events - self._slot.num_sent

    @property
    def num_visible(self) -> int:
        """The number of the last event that may be shown."""
        return self.log.num_events if self.commit is None else self.commit.num_released

    # --- EventSink

    @property
    def num_events(self) -> int:
        return self.log.num_events

    def begin(self, headers: Mapping[str, str]) -> None:
        self.has_begun = True
        self._headers = headers
        if (self.commit is None or self.commit.begin()) and self._live is not None:
            self._live.begin(headers)

    def send(self, prefix: bytes, payload: bytes, suffix: bytes) -> bool:
        """Always returns True: a reader that is too slow loses its connection, not its answer."""
        log, live, commit = self.log, self._live, self.commit
        event = prefix + payload + suffix
        log.append(event)
        if commit is not None and commit.add(log.num_events, prefix, payload, event, live is not None):
            return True
        if live is None:
            slot = self._slot
            if slot.reader is None and not log.holds(slot.num_sent):
                slot.abandon_soon()  # no client could get a whole answer any more
        elif not live.send(prefix, payload, suffix):
            self._cut_off_slow_reader()
        return True

    def fast_writer(self, prefix: bytes, suffix: bytes, on_slow_reader: Callable[[], None]) -> None:  # noqa: ARG002
        """There is no shorter path: each event has to be logged."""
        return

    def cork(self) -> None:
        if self._live is not None:
            self._live.cork()

    def comment(self, data: bytes) -> None:
        if self._live is not None and self._live.has_begun:
            self._live.comment(data)

    def end(self) -> None:
        self.ended = True
        if self.commit is None or self.commit.end():
            self._finish_reader()

    def break_off(self, last_event: bytes, linger_seconds: float) -> None:  # noqa: ARG002
        self.send(last_event, b"", b"")
        self.end()

    def _finish_reader(self) -> None:
        if self._live is not None and self._slot.reader is not None:
            self._live.end()
            self._slot.reader.finish()

    def release(self, up_to: int) -> None:
        """Events up to that number may be shown."""
        commit, live = self.commit, self._live
        if commit is None:  # closed meanwhile
            return
        released = commit.release(up_to, self.log.num_events)
        if live is None or not self.has_begun:
            return
        if not live.has_begun:
            live.begin(self._headers)
        if len(released) > 1:
            live.cork()
        for event in released:
            if not live.send(event, b"", b""):
                self._cut_off_slow_reader()
                return
        if self.ended and not commit.has_held_events:
            self._finish_reader()

    # --- the reader

    def refuse(self, error: KvloomError) -> None:
        """It ended before it began: its reader gets the error, with its HTTP status."""
        self.error = error
        self.ended = True
        if self._slot.reader is not None:
            self._slot.reader.finish()

    def attach(self, reader: ConnectionReader) -> None:
        """Make `reader` the one that reads, behind the last event that it has; it then has to call `follow`. Raises
        KvloomError (INVALID_ARGUMENT, EVENTS_GONE), and then nothing has changed."""
        self._slot.attach(reader)
        self._leave_live()

    async def follow(self, reader: ConnectionReader, writer: AbstractStreamWriter) -> None:
        """Write to an attached reader the events that it missed, and then new ones, until it is over. Raises
        KvloomError if nothing was written."""
        try:
            if self.has_begun and (self.commit is None or self.commit.is_shown):
                reader.events.begin(self._headers)
                await self._catch_up(reader, writer)
            if self._slot.reader is reader:
                self._go_live(reader)
            await reader.over
        finally:
            if self._slot.detach(reader, is_resumable=self._is_known_to_client):
                self._leave_live()
                self._on_left(self)
        error = reader.error or self.error
        if error is not None and not reader.events.has_begun:
            raise error.with_traceback(None)

    async def _catch_up(self, reader: ConnectionReader, writer: AbstractStreamWriter) -> None:
        """Returns once the reader has all visible events; nothing is awaited between that check and the return."""
        events = reader.events
        try:
            while self._slot.reader is reader and events.num_events < self.num_visible:
                self._slot.check_kept(events.num_events)
                missed = self.log.read(events.num_events, CATCH_UP_BYTES)[: self.num_visible - events.num_events]
                events.replay(missed)
                reader.num_replayed += len(missed)
                async with asyncio.timeout(CATCH_UP_SECONDS):
                    await writer.drain()
        except TimeoutError:
            if self._slot.reader is reader:  # not one that has taken over meanwhile
                self._cut_off_slow_reader()
        except KvloomError as error:
            self.break_reader_off(error)

    def _go_live(self, reader: ConnectionReader) -> None:
        """The reader has all visible events; from now on each event is written to it as it becomes visible."""
        try:
            self._slot.check_kept(reader.position)
        except KvloomError as error:
            self.break_reader_off(error)
            return
        self._live = reader.events
        if self.commit is not None:
            self.commit.hold(self.log.read_all(reader.position))
        if self.ended and not (self.commit is not None and self.commit.has_held_events):
            self._finish_reader()

    def _leave_live(self) -> None:
        self._live = None
        if self.commit is not None:
            self.commit.hold(())

    def _cut_off_slow_reader(self) -> None:
        self._on_slow_reader()
        message = "The connection was closed because the client reads it too slowly. The stream can be resumed."
        self.break_reader_off(KvloomError(ErrorReason.ERROR_REASON_CLIENT_TOO_SLOW, message))

    def break_reader_off(self, error: KvloomError) -> None:
        """End the reader, if there is one, with `error`; the stream continues without it."""
        if self.is_attended:
            self._leave_live()
            self._slot.break_off(error, is_resumable=self._is_known_to_client)
            self._on_left(self)

    # --- no reader

    @property
    def _is_known_to_client(self) -> bool:
        """A client can name the response: it has seen the id, or chosen a key."""
        return self.has_begun or bool(self.name.idempotency_key)

    def await_reader(self) -> None:
        """Start the grace period of a stream whose client is expected to attach."""
        self._slot.await_reader()

    def keep_for(self, seconds: float) -> None:
        """From now on wait that long for a reader, not for the grace period."""
        self._slot.wait_for(seconds)

    def abandon_soon(self) -> None:
        """End and forget it in the next turn of the event loop: the caller may be in the middle of an event."""
        self._slot.abandon_soon()

    def close(self) -> None:
        """Forget everything."""
        reader = self._slot.close()
        self.log.close()
        self._live = self.commit = None  # the commit cursor refers back to this stream
        if reader is not None:
            message = "The response is no longer kept."
            reader.break_off(KvloomError(ErrorReason.ERROR_REASON_EVENTS_GONE, message))
