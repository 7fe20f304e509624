"""One HTTP connection and its limits before there is a request.

aiohttp limits the request line and each header, and closes idle connections. This module adds the limits that it lacks:
the number of connections, the duration and total size of a request's head, the size of pipelined requests, and the
detection of peers that vanished.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Final, cast

import structlog
from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.streams import StreamReader

from edge_http.edge import Edge
from edge_http.formatting.error_formats import error_format_of
from edge_http.formatting.json_bytes import encode_json
from edge_http.wire.headers import REQUEST_ID, new_request_id, unsupported_transfer_coding
from edge_http.wire.json_response import error_response
from edge_http.wire.large_body import RESPONSE_SECONDS
from edge_http.wire.request_record import log_refused_connection
from edge_http.wire.sse import WrittenResponse
from kvloom.errors import KvloomError, invalid_argument, request_timeout
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.limits.address_limit import AddressLimit
from kvloom_common.limits.byte_budget import ByteLease
from kvloom_common.limits.client_address import Address

log = structlog.get_logger()

KEEPALIVE_SECONDS: Final = 75.0
"""Idle connections are closed after this time. It exceeds load balancers' usual 60 s, so that they close first."""
LINGER_SECONDS: Final = 2.0
"""How long the rest of a rejected body is read, so that its sender sees the response."""
MAX_HEADERS: Final = 100
SILENT_PEER_SECONDS: Final = 30
"""A peer that acknowledges neither data nor keep-alive probes for about this long is considered gone."""
RETRY_SECONDS: Final = 2.0
MAX_PIPELINED_BYTES: Final = 64 * 2**10
"""Requests that wait behind another one of their connection may hold so many bytes before no more is read."""
REQUEST_BYTES: Final = 2048
"""A request holds so many bytes besides its body."""
_CODING_FAULTS: Final = ("nvalid `Transfer-Encoding`", "Duplicate 'Transfer-Encoding'")
"""aiohttp's parser says this of transfer codings that it refuses by itself."""
ROUTE: Final = "connection"
"""The route label in metrics for connections that ended before there was a request."""


class Connection(web.RequestHandler):
    __slots__ = ("_address_limit", "_counted_address", "_edge", "_head_timer", "_num_head_bytes", "_pipelined")

    def __init__(self, manager: web.Server, edge: Edge, address_limit: AddressLimit) -> None:
        super().__init__(
            manager,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=KEEPALIVE_SECONDS,
            lingering_time=LINGER_SECONDS,
            max_line_size=edge.config.max_header_bytes,
            max_field_size=edge.config.max_header_bytes,
            max_headers=MAX_HEADERS,
            auto_decompress=False,
            access_log=cast(Any, None),
        )
        self._edge = edge
        self._address_limit = address_limit
        self._counted_address: Address | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        """Runs while the connection waits for a request's head."""
        self._num_head_bytes = 0
        """The number of bytes of an incomplete head."""
        self._pipelined: ByteLease | None = None
        """The lease of requests behind the one that is being handled; None if there have been none."""

    async def serve(self, request: web.BaseRequest) -> web.StreamResponse:
        """Serve a request that is no HTTP: a message of this connection, which has become a WebSocket."""
        manager = self._manager
        if manager is None:
            raise ConnectionResetError("the connection is closed")
        return await manager.request_handler(request)

    # -- asyncio.Protocol ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        manager = self._manager
        super().connection_made(transport)
        if manager is not None and len(manager.connections) > self._edge.admission.caller_limits.max_connections:
            self._refuse(
                KvloomError(
                    ErrorReason.ERROR_REASON_OVERLOADED,
                    "This server has too many connections.",
                    retry_after_seconds=RETRY_SECONDS,
                )
            )
            return
        if not self._edge.may_connect(transport):
            message = "This port is for other edges of the fabric."
            self._refuse(KvloomError(ErrorReason.ERROR_REASON_PERMISSION_DENIED, message))
            return
        peer = transport.get_extra_info("peername")
        try:
            self._counted_address = self._address_limit.open(str(peer[0]) if isinstance(peer, tuple) else "")
        except ValueError:
            self._refuse(
                KvloomError(
                    ErrorReason.ERROR_REASON_RATE_LIMITED,
                    f"Your address has {self._edge.admission.caller_limits.max_connections_per_address} connections to "
                    "this server, which is the most that one may have (callers.max_connections_per_address).",
                    retry_after_seconds=RETRY_SECONDS,
                )
            )
            return
        _watch_peer(transport.get_extra_info("socket"))
        self._start_head_timer()

    def data_received(self, data: bytes) -> None:
        num_requests = self._request_count
        super().data_received(data)
        if self._request_in_progress and self._messages:
            self._bound_pipelined()
        if self._request_count != num_requests:
            self._stop_head_timer()
        elif self._awaits_head and data:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > 2 * self._edge.config.max_header_bytes:  # the request line, and all headers
                self._refuse(_head_too_large(self._edge.config.max_header_bytes))
            elif self._head_timer is None:
                self._start_head_timer()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._counted_address is not None:
            self._address_limit.close(self._counted_address)
            self._counted_address = None
        self._stop_head_timer()
        if self._pipelined is not None:
            self._pipelined.release()
            self._pipelined = None
        super().connection_lost(exc)

    # -- aiohttp ------------------------------------------------------------------------------------------------------

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002
    ) -> web.StreamResponse:
        """aiohttp calls this for malformed HTTP and for failed handlers. The connection is closed."""
        if isinstance(exc, LineTooLong):
            error = _head_too_large(self._edge.config.max_header_bytes)
        elif any(fault in str(exc) for fault in _CODING_FAULTS):
            error = unsupported_transfer_coding()
        elif status < 500:
            error = invalid_argument("The request is not valid HTTP.")
        else:
            if isinstance(exc, ConnectionError):  # the client or the peer edge has disconnected
                log.info("connection_ended_early", error=str(exc))
            else:
                log.error("connection_failed", exc_info=exc)
            error = KvloomError(ErrorReason.ERROR_REASON_INTERNAL, "Something went wrong on our side.")
        response = error_response(error, error_format_of(request.path))
        response.force_close()
        if status < 500:  # other requests have been logged
            log_refused_connection(self._edge.access_log, response.status, error)
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Limit how long a client that does not read its response can keep it in memory."""
        if self._pipelined is not None:  # the requests that wait are fewer since it was last counted
            self._pipelined.resize(min(self._pipelined_bytes(), self._pipelined.num_bytes))
        if isinstance(resp, WrittenResponse):
            return await super().finish_response(request, resp, start_time)  # it has been written already
        try:
            async with asyncio.timeout(RESPONSE_SECONDS):
                return await super().finish_response(request, resp, start_time)
        except TimeoutError:
            if self.transport is not None:
                self.transport.abort()
            return resp, True

    # -- pipelined requests -------------------------------------------------------------------------------------------

    def _bound_pipelined(self) -> None:
        """Requests wait behind the one that is being handled. Nothing more is read while they hold much; those that are
        too much for the process or for their address are dropped, and the connection ends after the current answer."""
        if self._pipelined is None:
            peer = self.transport.get_extra_info("peername") if self.transport is not None else None
            self._pipelined = self._edge.admission.pipelined.lease(str(peer[0]) if isinstance(peer, tuple) else "")
        held_bytes = self._pipelined_bytes()
        try:
            self._pipelined.resize(held_bytes)
        except KvloomError as error:
            self._messages.clear()
            self._pipelined.resize(0)
            self.close()
            self._edge.metrics.on_response(ROUTE, error.kind.http_status)
            log_refused_connection(self._edge.access_log, error.kind.http_status, error)
            return
        if held_bytes > MAX_PIPELINED_BYTES and not self._buffer_paused:
            self._pause_reading_for_buffer()

    def _pipelined_bytes(self) -> int:
        return sum(REQUEST_BYTES + _num_buffered(payload) for _, payload in self._messages)

    def _resume_reading_if_drained(self) -> None:
        """aiohttp calls this when it has taken a request out of the queue while reading is paused."""
        if self._pipelined is not None:
            held_bytes = self._pipelined_bytes()
            if held_bytes > MAX_PIPELINED_BYTES:
                return
            self._pipelined.resize(held_bytes)
        super()._resume_reading_if_drained()

    # -- heads --------------------------------------------------------------------------------------------------------

    @property
    def _awaits_head(self) -> bool:
        return self._waiter is not None and not self._waiter.done()

    def _start_head_timer(self) -> None:
        self._head_timer = self._loop.call_later(self._edge.config.header_timeout_seconds, self._on_head_timeout)

    def _stop_head_timer(self) -> None:
        self._num_head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_head_timeout(self) -> None:
        self._head_timer = None
        if not self._awaits_head:
            return
        if self._num_head_bytes:
            seconds = self._edge.config.header_timeout_seconds
            self._refuse(request_timeout(f"The request's headers did not arrive within {seconds:g} s."))
        else:  # browsers open connections in advance
            self.force_close()

    def _refuse(self, error: KvloomError) -> None:
        """Write the error directly to the transport: without a request, aiohttp cannot send a response."""
        self._stop_head_timer()
        response = error_response(error)
        body = encode_json(error.to_openai())
        lines = [f"HTTP/1.1 {response.status} {response.reason}", "Connection: close", f"Content-Length: {len(body)}"]
        lines += ["Content-Type: application/json; charset=utf-8"]
        lines += [f"{name}: {value}" for name, value in response.headers.items() if name.lower().startswith("retry-")]
        lines += [f"{REQUEST_ID}: {new_request_id()}"]
        transport = self.transport
        if transport is not None:
            transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self._edge.metrics.on_response(ROUTE, response.status)
        log_refused_connection(self._edge.access_log, response.status, error)
        self.force_close()


def _head_too_large(max_bytes: int) -> KvloomError:
    message = f"The request line or a header is too long: at most {max_bytes} bytes."
    return KvloomError(ErrorReason.ERROR_REASON_REQUEST_TOO_LARGE, message)


def _num_buffered(payload: Any) -> int:
    return payload.total_bytes if isinstance(payload, StreamReader) else 0


def _watch_peer(peer: socket.socket | None) -> None:
    """Detect that the other machine has vanished, by unacknowledged data and by probes while nothing is sent."""
    if peer is None or peer.family not in (socket.AF_INET, socket.AF_INET6):
        return
    options = {
        "TCP_KEEPIDLE": SILENT_PEER_SECONDS // 2,
        "TCP_KEEPINTVL": SILENT_PEER_SECONDS // 6,
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": 2 * SILENT_PEER_SECONDS * 1000,
    }
    for name, value in options.items():
        number = getattr(socket, name, None)  # not every operating system has all of them
        if number is not None:
            peer.setsockopt(socket.IPPROTO_TCP, number, value)
