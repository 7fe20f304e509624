"""Server-sent events, written straight to the transport: no task, queue or await lies between a token and its bytes.

Only the changing part of an event is encoded: an event is prefix + payload + suffix, of which only the payload differs
from one token to the next; its name, if it has one, and `data: ` are part of the prefix. Events of a stream that can be
resumed are numbered, by `id: N` before them. This is the only place that knows how HTTP/1.1 frames events: each is one
chunk.

uvloop hands every write to the kernel at once. Therefore a stream that is about to send more than one event in a turn
of the event loop (the head and the first token, or the last token and the end) is corked: its bytes leave together at
the end of the turn, or before the next token of another stream. An engine step has its first tokens in front, so these
do not wait for the tokens of the other streams.
"""

from __future__ import annotations

import asyncio
import email.utils
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import aiohttp
from aiohttp import web

from edge_http.formatting.json_bytes import encode_json
from edge_http.wire.headers import REPLAYED
from edge_http.wire.request_record import RequestRecord
from kvloom_common.process.request_context import current_request

_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\n"
    b"Content-Type: text/event-stream; charset=utf-8\r\n"
    b"Cache-Control: no-cache, no-transform\r\n"
    b"X-Accel-Buffering: no\r\n"  # without it nginx collects the events
)
_EVENT_END: Final = b"\n\n"
_CHUNK_END: Final = b"\r\n"
_LAST_CHUNK: Final = b"0\r\n\r\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class EventSink(Protocol):
    """The destination of a streamed answer. None of its methods raises or blocks."""

    @property
    def num_events(self) -> int: ...

    @property
    def has_begun(self) -> bool:
        """The status line was sent, or would have been if a client were connected."""
        ...

    def begin(self, headers: Mapping[str, str]) -> None:
        """Send status 200 and the headers. Values must be free of line breaks."""
        ...

    def send(self, prefix: bytes, payload: bytes, suffix: bytes) -> bool:
        """Send one event. Returns False if the reader is too slow: the event was not sent, and the stream must end."""
        ...

    def fast_writer(
        self, prefix: bytes, suffix: bytes, on_slow_reader: Callable[[], None]
    ) -> Callable[[str], None] | None:
        """A shorter path for the text of all further events except the last ones; None if there is none."""
        ...

    def cork(self) -> None:
        """Announce more than one event: what is sent in this turn of the event loop may leave in one write."""
        ...

    def comment(self, data: bytes) -> None:
        """Send bytes that are no event of the answer, and that no client gets again."""
        ...

    def end(self) -> None:
        """The answer is complete."""
        ...

    def break_off(self, last_event: bytes, linger_seconds: float) -> None:
        """End with one more event, then close the connection."""
        ...


@functools.lru_cache(maxsize=1)
def _date_line(unix_seconds: int) -> bytes:
    return f"Date: {email.utils.formatdate(unix_seconds, usegmt=True)}\r\n".encode()


class WriteCoalescer:
    """The corked streams of one event loop."""

    def __init__(self) -> None:
        self.waiting: list[EventStream] = []

    def add(self, stream: EventStream) -> None:
        if not self.waiting:
            asyncio.get_running_loop().call_soon(self.flush)
        self.waiting.append(stream)

    def flush(self) -> None:
        """Write what all corked streams hold back."""
        waiting, self.waiting = self.waiting, []
        for stream in waiting:
            stream.uncork()


class EventStream:
    """The EventSink of one response. What is sent to a lost connection is dropped."""

    __slots__ = (
        "_after_text",
        "_before_text",
        "_chunked",
        "_coalescer",
        "_corked",
        "_keep_alive",
        "_max_buffered_bytes",
        "_num_fixed_bytes",
        "_numbered",
        "_on_slow_reader",
        "_record",
        "_transport",
        "ended",
        "has_begun",
        "num_events",
    )

    def __init__(
        self,
        request: web.BaseRequest,
        max_buffered_bytes: int,
        write_coalescer: WriteCoalescer,
        *,
        last_event_number: int | None = None,
    ) -> None:
        """`last_event_number`: of the last event that the client already has, if events are numbered."""
        self._transport = request.transport
        self._record = current_request()
        self._max_buffered_bytes = max_buffered_bytes
        # Without chunks (HTTP/1.0) only the end of the connection marks the end of the answer.
        self._chunked = request.version >= aiohttp.HttpVersion11
        self._keep_alive = request.keep_alive and self._chunked
        self._numbered = last_event_number is not None
        self.num_events = last_event_number or 0
        """The number of the last event that the client may have."""
        self._corked: bytearray | None = None
        """The bytes that leave when the stream is uncorked; None: everything leaves at once."""
        self._coalescer = write_coalescer
        self.has_begun = False
        """The status line was sent."""
        self.ended = False
        self._before_text = self._after_text = b""
        """For `push`: the bytes of an event before its text, and those behind it."""
        self._num_fixed_bytes = 0
        """For `push`: the size of an event without its text."""
        self._on_slow_reader: Callable[[], None] | None = None

    def begin(self, headers: Mapping[str, str]) -> None:
        self.has_begun = True
        if isinstance(self._record, RequestRecord):  # a stream that is resumed has the headers of this request
            headers = {**headers, **self._record.response_headers()}
        lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
        lines.append("Transfer-Encoding: chunked\r\n" if self._chunked else "")
        lines.append("\r\n" if self._keep_alive else "Connection: close\r\n\r\n")
        self._write(_HEAD + _date_line(int(time.time())) + "".join(lines).encode())

    def comment(self, data: bytes) -> None:
        transport = self._transport
        if self.ended or transport is None or transport.is_closing():
            return
        if transport.get_write_buffer_size() <= self._max_buffered_bytes:
            self._write(_chunk(data) if self._chunked else data)

    def cork(self) -> None:
        if self._corked is None:
            self._corked = bytearray()
            self._coalescer.add(self)

    def uncork(self) -> None:
        """Write what was held back. A second call has no effect."""
        corked, self._corked = self._corked, None
        if corked:
            self._write(bytes(corked))

    def send(self, prefix: bytes, payload: bytes, suffix: bytes) -> bool:
        transport = self._transport
        if transport is None or transport.is_closing() or self.ended:
            return True
        if transport.get_write_buffer_size() > self._max_buffered_bytes:
            return False
        self.num_events = number = self.num_events + 1
        event_id = b"id: %d\n" % number if self._numbered else b""
        event = b"".join((event_id, prefix, payload, suffix, _EVENT_END))
        if self._chunked:
            event = _chunk(event)
        if self._corked is None:
            if self._coalescer.waiting:
                self._coalescer.flush()
            transport.write(event)
        else:
            self._corked += event
        return True

    def fast_writer(
        self, prefix: bytes, suffix: bytes, on_slow_reader: Callable[[], None]
    ) -> Callable[[str], None] | None:
        """Returns `push`, which replaces `send` for events with this prefix and suffix; None over HTTP/1.0 and for
        numbered events."""
        if not self._chunked or self._numbered or self.ended:
            return None
        self._before_text, self._after_text = prefix, suffix + _EVENT_END + _CHUNK_END
        self._num_fixed_bytes = len(prefix) + len(suffix) + len(_EVENT_END)
        self._on_slow_reader = on_slow_reader
        return self.push

    def push(self, text: str) -> None:
        """The hot path: send the next event, whose text this is."""
        transport = self._transport
        if self.ended or not text or transport is None or transport.is_closing():
            return
        if transport.get_write_buffer_size() > self._max_buffered_bytes:
            if self._on_slow_reader is not None:
                self._on_slow_reader()
            return
        self.num_events += 1
        payload = encode_json(text)
        size = self._num_fixed_bytes + len(payload)
        event = b"%x\r\n%b%b%b" % (size, self._before_text, payload, self._after_text)
        if self._corked is not None:
            self._corked += event
            return
        if self._coalescer.waiting:
            self._coalescer.flush()
        transport.write(event)

    def replay(self, events: Sequence[bytes]) -> None:
        """Send the next events, however much is buffered."""
        first_number = self.num_events + 1
        self.num_events += len(events)
        numbered = [b"id: %d\n%b\n\n" % event for event in enumerate(events, first_number)]
        self._write(b"".join(map(_chunk, numbered) if self._chunked else numbered))

    def end(self) -> None:
        """Complete the response; the connection can serve the next request."""
        if self.has_begun and not self.ended:
            self._write(_LAST_CHUNK if self._chunked else b"")
        self.ended = True
        self._on_slow_reader = None  # it refers back to this object

    def break_off(self, last_event: bytes, linger_seconds: float) -> None:
        """End with one more event, whatever is buffered, then close the connection: within `linger_seconds` if the
        reader does not read what was written. The event has no id: it concerns the connection and is no part of the
        answer."""
        self._keep_alive = False
        event = last_event + b"\n\n"
        self._write(_chunk(event) if self._chunked else event)
        self.end()
        if self._transport is not None and not self._transport.is_closing():
            asyncio.get_running_loop().call_later(linger_seconds, self._transport.abort)

    def response(self) -> web.StreamResponse:
        """Returns what the handler returns once the stream has ended."""
        self.uncork()  # the next response on this connection must not overtake this one
        return _STAYS_OPEN if self._keep_alive else _CLOSES

    def _write(self, data: bytes) -> None:
        if self._corked is not None:
            self._corked += data
        elif data and self._transport is not None and not self._transport.is_closing():
            if self._coalescer.waiting:
                self._coalescer.flush()
            self._transport.write(data)


class ReplayedEventStream(EventStream):
    """For a client that has repeated its request with its idempotency key."""

    __slots__ = ()

    def begin(self, headers: Mapping[str, str]) -> None:
        super().begin({**headers, REPLAYED: "true"})


class WrittenResponse(web.StreamResponse):
    """Reports to aiohttp that the response is complete: its bytes were already written to the transport."""

    def __init__(self, *, keep_alive: bool) -> None:
        super().__init__()
        self._stays_open = keep_alive

    @property
    def keep_alive(self) -> bool:
        return self._stays_open

    async def prepare(self, request: web.BaseRequest) -> None:  # noqa: ARG002
        return None

    async def write_eof(self, data: bytes = b"") -> None:  # noqa: ARG002
        return None


_STAYS_OPEN: Final = WrittenResponse(keep_alive=True)
_CLOSES: Final = WrittenResponse(keep_alive=False)
