"""Server-sent events, written straight to the transport: no task, no queue, no await between a token and its bytes.

Nothing but the changing part is encoded: an event is `id: N` and `data: ` + prefix + payload + suffix, of which only
the payload differs from one token to the next. uvloop hands every write to the kernel at once, so what is known to be
more than one event in a turn of the event loop (the head and the first token, the last token and the end) is corked: it
leaves at the end of the turn, or before the next token of another stream. An engine step has its first tokens in front.
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

from edge_http.openai.response_formatters import encode_json

DONE: Final = b"[DONE]"
_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\n"
    b"Content-Type: text/event-stream; charset=utf-8\r\n"
    b"Cache-Control: no-cache, no-transform\r\n"
    b"X-Accel-Buffering: no\r\n"  # nginx would collect the events otherwise
)
_DATA: Final = b"\ndata: "
_EVENT_END: Final = b"\n\n\r\n"
"""With the end of its chunk."""
# Formatting them costs more than all else that is done for a token here.
_MAX_NUMBERS: Final = 4096
_MAX_SIZES: Final = 1024
_NUMBERS: Final = [b"%d" % number for number in range(_MAX_NUMBERS)]
_LAST_CHUNK: Final = b"0\r\n\r\n"


def _chunk_head(num_bytes: int) -> bytes:
    """Of an event's chunk. `num_bytes`: from the event's number to the end of the chunk."""
    return b"%x\r\nid: " % (len(b"id: ") + num_bytes - len(b"\r\n"))


_CHUNK_HEADS: Final = [_chunk_head(num_bytes) for num_bytes in range(_MAX_SIZES)]


class EventSink(Protocol):
    """Where a streamed answer goes. Nothing here raises or blocks."""

    @property
    def num_events(self) -> int: ...

    @property
    def begun(self) -> bool:
        """The status line is out, or would be if a client were there."""
        ...

    def begin(self, headers: Mapping[str, str]) -> None:
        """Send status 200 and the headers. Values must be free of line breaks."""
        ...

    def send(self, prefix: bytes, payload: bytes, suffix: bytes) -> bool:
        """Send one event. False: the reader is too slow, the event was not sent and the stream must end."""
        ...

    def fast_writer(
        self, prefix: bytes, suffix: bytes, on_slow_reader: Callable[[], None]
    ) -> Callable[[str], None] | None:
        """A shorter way for the text of all events that are to come but the last ones, if there is one."""
        ...

    def cork(self) -> None:
        """More than one event is about to come: what is sent in this turn of the event loop may leave together."""
        ...

    def end(self) -> None:
        """The answer is complete."""
        ...

    def break_off(self, last_payload: bytes, linger_seconds: float) -> None:
        """End with one more event, then close the connection."""
        ...


def split_framed(framed: bytes) -> list[bytes]:
    """Events in chunks of their own, as HTTP/1.1 sends them, apart again. Raises ValueError."""
    events: list[bytes] = []
    begin = 0
    while begin < len(framed):
        size_end = framed.index(b"\r\n", begin)
        end = size_end + 2 + int(framed[begin:size_end], 16) + 2
        events.append(framed[begin:end])
        begin = end
    return events


@functools.lru_cache(maxsize=1)
def _date_line(unix_seconds: int) -> bytes:
    return f"Date: {email.utils.formatdate(unix_seconds, usegmt=True)}\r\n".encode()


def _unframed(framed: bytes) -> bytes:
    return framed[framed.index(b"\r\n") + 2 : -2]


class WriteCoalescer:
    """The streams of one event loop that are corked."""

    def __init__(self) -> None:
        self.waiting: list[EventStream] = []

    def add(self, stream: EventStream) -> None:
        if not self.waiting:
            asyncio.get_running_loop().call_soon(self.pull)
        self.waiting.append(stream)

    def pull(self) -> None:
        """Let go what waits."""
        waiting, self.waiting = self.waiting, []
        for stream in waiting:
            stream.uncork()


class EventStream:
    """One response. `send` and `end` never raise and never block; a connection that is gone swallows everything."""

    __slots__ = (
        "_after_text",
        "_before_text",
        "_chunked",
        "_corked",
        "_corks",
        "_keep_alive",
        "_max_buffered_bytes",
        "_num_events",
        "_on_slow_reader",
        "_transport",
        "begun",
        "ended",
    )

    def __init__(self, request: web.BaseRequest, max_buffered_bytes: int, write_coalescer: WriteCoalescer) -> None:
        self._transport = request.transport
        self._max_buffered_bytes = max_buffered_bytes
        # Without chunks (HTTP/1.0) only the end of the connection can say where the answer ends.
        self._chunked = request.version >= aiohttp.HttpVersion11
        self._keep_alive = request.keep_alive and self._chunked
        self._num_events = 0
        self._corked: bytearray | None = None
        """What leaves when the cork is pulled; None: everything leaves at once."""
        self._corks = write_coalescer
        self.begun = False
        """The status line is out."""
        self.ended = False
        self._before_text = self._after_text = b""
        """Of text that flows: all between its event's number and itself, and all behind it."""
        self._on_slow_reader: Callable[[], None] | None = None

    @property
    def num_events(self) -> int:
        return self._num_events

    def begin(self, headers: Mapping[str, str]) -> None:
        """Send status 200 and the headers. Values must be free of line breaks."""
        self.begun = True
        lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
        lines.append("Transfer-Encoding: chunked\r\n" if self._chunked else "")
        lines.append("\r\n" if self._keep_alive else "Connection: close\r\n\r\n")
        self._write(_HEAD + _date_line(int(time.time())) + "".join(lines).encode())

    def cork(self) -> None:
        if self._corked is None:
            self._corked = bytearray()
            self._corks.add(self)

    def uncork(self) -> None:
        """Repeatable."""
        corked, self._corked = self._corked, None
        if corked:
            self._write(bytes(corked))

    def send(self, prefix: bytes, payload: bytes, suffix: bytes) -> bool:
        """Send one event. False: the reader is too slow, the event was not sent and the stream must end."""
        transport = self._transport
        if transport is None or transport.is_closing() or self.ended:
            return True
        if transport.get_write_buffer_size() > self._max_buffered_bytes:
            return False
        self._num_events = number = self._num_events + 1
        if self._chunked:
            event_id = _NUMBERS[number] if number < _MAX_NUMBERS else b"%d" % number
            event = b"".join((event_id, _DATA, prefix, payload, suffix, _EVENT_END))
            size = len(event)
            event = (_CHUNK_HEADS[size] if size < _MAX_SIZES else _chunk_head(size)) + event
        else:
            event = b"id: %d\ndata: %b%b%b\n\n" % (number, prefix, payload, suffix)
        if self._corked is None:
            if self._corks.waiting:
                self._corks.pull()
            transport.write(event)
        else:
            self._corked += event
        return True

    def fast_writer(
        self, prefix: bytes, suffix: bytes, on_slow_reader: Callable[[], None]
    ) -> Callable[[str], None] | None:
        """`push` instead of `send` for what has this prefix and suffix. Not over HTTP/1.0."""
        if not self._chunked or self.ended:
            return None
        self._before_text, self._after_text = _DATA + prefix, suffix + _EVENT_END
        self._on_slow_reader = on_slow_reader
        return self.push

    def push(self, text: str) -> None:
        """The hot path: the next event of a stream that flows."""
        transport = self._transport
        if self.ended or not text or transport is None or transport.is_closing():
            return
        if transport.get_write_buffer_size() > self._max_buffered_bytes:
            if self._on_slow_reader is not None:
                self._on_slow_reader()
            return
        self._num_events = number = self._num_events + 1
        event_id = _NUMBERS[number] if number < _MAX_NUMBERS else b"%d" % number
        event = b"".join((event_id, self._before_text, encode_json(text), self._after_text))
        size = len(event)
        event = (_CHUNK_HEADS[size] if size < _MAX_SIZES else _chunk_head(size)) + event
        if self._corked is not None:
            self._corked += event
            return
        if self._corks.waiting:
            self._corks.pull()
        transport.write(event)

    def write_framed(self, framed: bytes) -> bool:
        """Send an event that is in its HTTP/1.1 chunk already. False: the reader is too slow, it was not sent."""
        transport = self._transport
        if transport is None or transport.is_closing() or self.ended:
            return True
        if transport.get_write_buffer_size() > self._max_buffered_bytes:
            return False
        self._write(framed if self._chunked else _unframed(framed))
        return True

    def write_all_framed(self, framed: Sequence[bytes]) -> None:
        """Send events that are in their chunks already, however much is buffered."""
        self._write(b"".join(framed if self._chunked else map(_unframed, framed)))

    def end(self) -> None:
        """Complete the response; the connection can serve the next request."""
        if self.begun and not self.ended:
            self._write(_LAST_CHUNK if self._chunked else b"")
        self.ended = True
        self._on_slow_reader = None  # it points back here

    def break_off(self, last_payload: bytes, linger_seconds: float) -> None:
        """End with one more event whatever is buffered, then close: within `linger_seconds` if the reader does not
        take what is there. The event has no id: it is about the connection and no part of the answer."""
        self._keep_alive = False
        event = b"data: %b\n\n" % last_payload
        self._write(b"%x\r\n%b\r\n" % (len(event), event) if self._chunked else event)
        self.end()
        if self._transport is not None and not self._transport.is_closing():
            asyncio.get_running_loop().call_later(linger_seconds, self._transport.abort)

    def response(self) -> web.StreamResponse:
        """What the handler returns once the stream has ended."""
        self.uncork()  # whoever has the connection next must not be first
        return _STAYS_OPEN if self._keep_alive else _CLOSES

    def _write(self, data: bytes) -> None:
        if self._corked is not None:
            self._corked += data
        elif data and self._transport is not None and not self._transport.is_closing():
            if self._corks.waiting:
                self._corks.pull()
            self._transport.write(data)


class WrittenResponse(web.StreamResponse):
    """Tells aiohttp that the response is complete: its bytes are already with the transport."""

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
