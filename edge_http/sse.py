"""Server-sent events, written straight to the transport: no task, no queue, no await between a token and its bytes.

Nothing but the changing part is encoded: an event is `id: N` and `data: ` + prefix + payload + suffix, of which only
the payload differs from one token to the next. Several events of one turn of the event loop leave in one system call
(uvloop gathers the writes of a turn).
"""

from __future__ import annotations

import asyncio
import email.utils
from collections.abc import Mapping
from typing import Final

import aiohttp
from aiohttp import web

DONE: Final = b"[DONE]"
_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\n"
    b"Content-Type: text/event-stream; charset=utf-8\r\n"
    b"Cache-Control: no-cache, no-transform\r\n"
    b"X-Accel-Buffering: no\r\n"  # nginx would collect the events otherwise
)
_LAST_CHUNK: Final = b"0\r\n\r\n"


class EventStream:
    """One response. `send` and `end` never raise and never block; a connection that is gone swallows everything."""

    __slots__ = ("_chunked", "_keep_alive", "_max_buffered_bytes", "_num_events", "_transport", "begun", "ended")

    def __init__(self, request: web.BaseRequest, max_buffered_bytes: int) -> None:
        self._transport = request.transport
        self._max_buffered_bytes = max_buffered_bytes
        # Without chunks (HTTP/1.0) only the end of the connection can say where the answer ends.
        self._chunked = request.version >= aiohttp.HttpVersion11
        self._keep_alive = request.keep_alive and self._chunked
        self._num_events = 0
        self.begun = False
        """The status line is out."""
        self.ended = False

    @property
    def num_events(self) -> int:
        return self._num_events

    def begin(self, headers: Mapping[str, str]) -> None:
        """Send status 200 and the headers. Values must be free of line breaks."""
        self.begun = True
        lines = [_HEAD, f"Date: {email.utils.formatdate(usegmt=True)}\r\n".encode()]
        lines += [f"{name}: {value}\r\n".encode() for name, value in headers.items()]
        lines.append(b"Transfer-Encoding: chunked\r\n" if self._chunked else b"")
        lines.append(b"" if self._keep_alive else b"Connection: close\r\n")
        lines.append(b"\r\n")
        self._write(b"".join(lines))

    def send(self, prefix: bytes, payload: bytes, suffix: bytes) -> bool:
        """Send one event. False: the reader is too slow, the event was not sent and the stream must end."""
        transport = self._transport
        if transport is None or transport.is_closing() or self.ended:
            return True
        if transport.get_write_buffer_size() > self._max_buffered_bytes:
            return False
        self._num_events += 1
        event = b"id: %d\ndata: %b%b%b\n\n" % (self._num_events, prefix, payload, suffix)
        transport.write(b"%x\r\n%b\r\n" % (len(event), event) if self._chunked else event)
        return True

    def end(self) -> None:
        """Complete the response; the connection can serve the next request."""
        if self.begun and not self.ended:
            self._write(_LAST_CHUNK if self._chunked else b"")
        self.ended = True

    def break_off(self, last_payload: bytes, linger_seconds: float) -> None:
        """End with one more event whatever is buffered, then close: within `linger_seconds` if the reader does not
        take what is there."""
        self._keep_alive = False
        self._num_events += 1
        event = b"id: %d\ndata: %b\n\n" % (self._num_events, last_payload)
        self._write(b"%x\r\n%b\r\n" % (len(event), event) if self._chunked else event)
        self.end()
        if self._transport is not None and not self._transport.is_closing():
            asyncio.get_running_loop().call_later(linger_seconds, self._transport.abort)

    def response(self) -> web.StreamResponse:
        """What the handler returns once the stream has ended."""
        return _WrittenResponse(keep_alive=self._keep_alive)

    def _write(self, data: bytes) -> None:
        if data and self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)


class _WrittenResponse(web.StreamResponse):
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
