"""A message of a WebSocket as a request: handlers serve it as they serve HTTP, and write its events as messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
from aiohttp import web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.streams import StreamReader
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from edge_http.wire.headers import IDEMPOTENCY_KEY, LAST_EVENT_ID, REQUEST_ID, RESPONSE_ID
from edge_http.wire.request_record import AnswerFigures, RequestRecord
from edge_http.wire.socket_frames import POLICY_VIOLATION, close_at_once, error_message, text_frame
from edge_http.wire.sse import EventStream, WriteCoalescer

PATH: Final = "/v1/responses"
_DATA: Final = b"data: "
_OF_ONE_MESSAGE: Final = frozenset(
    name.lower()
    for name in (
        "Connection",
        "Content-Encoding",
        "Content-Length",
        "Content-Type",
        "Expect",
        IDEMPOTENCY_KEY,
        LAST_EVENT_ID,
        "Transfer-Encoding",
        "Upgrade",
        REQUEST_ID,
        "x-correlation-id",
    )
)
"""Headers that concern the handshake alone, or could name but one of the requests that follow it."""


class MessageRequest(web.BaseRequest):
    """A POST of a response, with the headers of the handshake of its WebSocket."""

    ATTRS = web.BaseRequest.ATTRS | {"events", "generates", "on_begun", "tail"}

    def __init__(
        self,
        handshake: web.BaseRequest,
        body: bytes,
        stream_id: str | None,
        on_begun: Callable[[], None],
        *,
        generates: bool,
    ) -> None:
        """`stream_id`: the lane, if it has a name. `on_begun` is called when the id of the response is known.
        `generates`: the response has an output."""
        loop = asyncio.get_running_loop()
        content = StreamReader(BaseProtocol(loop), limit=len(body) + 1, loop=loop)
        content.feed_data(body)
        content.feed_eof()
        headers = CIMultiDict(
            (name, value)
            for name, value in handshake.headers.items()
            if name.lower() not in _OF_ONE_MESSAGE and not name.lower().startswith("sec-websocket-")
        )
        headers["Content-Type"] = "application/json"
        message = handshake._message._replace(
            method="POST", path=PATH, url=URL(PATH), headers=CIMultiDictProxy(headers), raw_headers=(), upgrade=False
        )
        task: Any = asyncio.current_task()
        super().__init__(message, content, handshake.protocol, handshake.writer, task, loop)
        self.tail = b"}" if stream_id is None else b',"stream_id":"%b"}' % stream_id.encode()
        """The end of each of its messages."""
        self.on_begun = on_begun
        self.generates = generates
        self.events: MessageStream | None = None
        """The answer; None: there is none yet."""


class MessageStream(EventStream):
    """Sends the events of an answer as messages."""

    __slots__ = ("_request", "last", "response_id")

    def __init__(
        self,
        request: web.BaseRequest,
        max_buffered_bytes: int,
        write_coalescer: WriteCoalescer,
        *,
        last_event_number: int | None = None,
    ) -> None:
        """`request` is a MessageRequest."""
        assert isinstance(request, MessageRequest)
        super().__init__(request, max_buffered_bytes, write_coalescer, last_event_number=last_event_number)
        self._request = request
        self.response_id = ""
        self.last = b""
        """The JSON of the last event."""
        request.events = self

    @property
    def answer(self) -> AnswerFigures | None:
        """The answer whose events these are, while it is generated."""
        return self._record.answer if isinstance(self._record, RequestRecord) else None

    def begin(self, headers: Mapping[str, str]) -> None:
        """Its headers are not sent: there is no place for them."""
        self.has_begun = True
        self.response_id = headers[RESPONSE_ID]
        self._request.on_begun()

    def comment(self, data: bytes) -> None:
        """Sends nothing: pings keep the connection alive."""

    def send(self, prefix: bytes, payload: bytes, suffix: bytes) -> bool:
        transport = self._transport
        if transport is None or transport.is_closing() or self.ended:
            return True
        if transport.get_write_buffer_size() > self._max_buffered_bytes:
            return False
        self.num_events += 1
        self._send(b"".join((prefix, payload, suffix)))
        return True

    def fast_writer(self, prefix: bytes, suffix: bytes, on_slow_reader: Callable[[], None]) -> None:  # noqa: ARG002
        """There is no shorter path: the events of responses are numbered."""
        return

    def replay(self, events: Sequence[bytes]) -> None:
        self.num_events += len(events)
        for event in events:
            self._send(event)

    def end(self) -> None:
        self.ended = True

    def break_off(self, last_event: bytes, linger_seconds: float) -> None:  # noqa: ARG002
        """End the answer with an error. The connection ends, too, if it is the one that is too slow."""
        about = msgspec.json.decode(_data_of(last_event), type=dict[str, Any])
        error = {"type": "server_error", "code": about["code"], "message": about["message"], "param": about["param"]}
        message = {**error_message(error, None), "sequence_number": self.num_events}
        self._write(text_frame(msgspec.json.encode(message)[:-1] + self._request.tail))
        self.end()
        if self._transport is not None and self._transport.get_write_buffer_size() > self._max_buffered_bytes:
            self.uncork()
            close_at_once(self._transport, POLICY_VIOLATION)

    def _send(self, event: bytes) -> None:
        self.last = _data_of(event)
        self._write(text_frame(self.last[:-1] + self._request.tail))


def stream_for(request: web.BaseRequest, over_http: type[EventStream] = EventStream) -> type[EventStream]:
    """How the events of the answer to this request are sent."""
    return MessageStream if type(request) is MessageRequest else over_http


def _data_of(event: bytes) -> bytes:
    """The JSON of an event, which may have a name before it."""
    return event[event.index(_DATA) + len(_DATA) :]
