"""One WebSocket of the Responses API. Each of its messages is served as a request of its own: whatever holds for
requests over HTTP, such as keys, limits, metering and safety, holds for them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Final

import msgspec
from aiohttp import WSMsgType, web
from yarl import URL

from edge_http.admission import draining_error
from edge_http.edge import Edge
from edge_http.sockets.lane import Lane, LaneParts
from edge_http.sockets.lineage import Lineage
from edge_http.sockets.messages import Create, SocketError, Steer, SteerMessage, read_create, text_of
from edge_http.sockets.steering import failed
from edge_http.wire.socket_frames import SERVICE_RESTART, UNSUPPORTED_DATA, error_message
from kvloom.errors import KvloomError, invalid_argument
from kvloom.v1.error_reason_pb2 import ErrorReason

MAX_SECONDS: Final = 3600.0
"""A connection is closed after this time, when its answers have ended."""
PING_SECONDS: Final = 30.0
"""A client that does not answer a ping for half as long is gone."""
MAX_LANES: Final = 32
"""Lanes of a connection that have names."""
MAX_WAITING: Final = 64
"""Requests of a connection that wait for others of it."""


async def connect(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    """Serve GET /v1/responses."""
    if request.headers.get("Upgrade", "").lower() != "websocket":
        message = "GET opens a WebSocket here. Other clients use POST, or GET /v1/responses/{id}."
        raise KvloomError(ErrorReason.ERROR_REASON_METHOD_NOT_ALLOWED, message)
    _check_origin(edge, request)
    if edge.admission.draining or edge.admission.leaving:
        raise draining_error()
    caller = edge.callers.caller_of(request)
    edge.sockets.check(caller)
    response = web.WebSocketResponse(
        heartbeat=PING_SECONDS, max_msg_size=edge.config.max_body_bytes, compress=False, decode_text=False
    )
    if not response.can_prepare(request):
        raise invalid_argument("The request is no valid handshake of a WebSocket.")
    with edge.admission.pipelined.lease(caller) as waiting, edge.admission.collected.lease(caller) as known:
        await response.prepare(request)
        protocol: Any = request.protocol
        lineage = Lineage(known, 2 * edge.config.max_body_bytes)
        parts = LaneParts(request, protocol.serve, lineage, waiting, edge.config.max_buffered_bytes)
        socket = ResponsesSocket(edge, response, parts)
        edge.sockets.add(socket, caller)
        try:
            await socket.run()
        finally:
            edge.sockets.remove(socket)
    return response


def _check_origin(edge: Edge, request: web.BaseRequest) -> None:
    """A browser lets every page open WebSockets to any server, so that this has to tell pages apart. Raises KvloomError
    (PERMISSION_DENIED)."""
    origin = request.headers.get("Origin")
    if origin is None or (edge.cors is not None and edge.cors.allows(origin)):
        return
    with contextlib.suppress(ValueError):
        if URL(origin).authority == request.headers.get("Host"):
            return
    message = "Pages of this origin may not use this server (edge.cors_origins)."
    raise KvloomError(ErrorReason.ERROR_REASON_PERMISSION_DENIED, message)


class ResponsesSocket:
    """A WebSocket that is open (OpenSocket)."""

    def __init__(self, edge: Edge, response: web.WebSocketResponse[Any], parts: LaneParts) -> None:
        self._edge = edge
        self._response = response
        self._parts = parts
        self._lanes: dict[str | None, Lane] = {}
        self._closing: asyncio.Task[None] | None = None
        """Set once it takes no further requests."""

    async def run(self) -> None:
        """Serve until the connection ends. What is still being answered then is cancelled."""
        timer = asyncio.get_running_loop().call_later(MAX_SECONDS, self._expire)
        try:
            async for message in self._response:
                if message.type is WSMsgType.BINARY:
                    await self._response.close(code=UNSUPPORTED_DATA)
                if message.type is not WSMsgType.TEXT:
                    break
                await self._edge.admission.fair_yield.take(len(message.data))
                self._receive(message.data)
        finally:
            timer.cancel()
            tasks = [*self._tasks(), *filter(None, [self._closing])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def leave(self) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._close_when_idle(), name="closing of a WebSocket")

    def _expire(self) -> None:
        message = f"A connection lasts {MAX_SECONDS / 60:g} minutes. Open another one."
        error = SocketError("websocket_connection_limit_reached", message).error
        self._parts.send(error_message(error, None, 400))
        self.leave()

    async def _close_when_idle(self) -> None:
        await asyncio.gather(*self._tasks(), return_exceptions=True)
        await self._response.close(code=SERVICE_RESTART)

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [lane.task for lane in self._lanes.values() if lane.task is not None and not lane.task.done()]

    def _receive(self, data: bytes) -> None:
        stream_id: str | None = None
        try:
            fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
            kind, stream_id = text_of(fields.get("type")), text_of(fields.get("stream_id")) or None
            if kind == "response.create":
                self._create(read_create(fields, len(data)))
            elif kind == "response.steer":
                self._steer(data, fields)
            else:
                raise invalid_argument("type must be response.create or response.steer.", "type")
        except SocketError as error:
            named = None if error.error["param"] == "stream_id" else stream_id
            self._parts.send(error_message(error.error, named, 400))
        except KvloomError as error:
            self._parts.refuse(error, stream_id)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self._parts.refuse(invalid_argument("A message must be a JSON object."), stream_id)

    def _create(self, create: Create) -> None:
        """Raises KvloomError, SocketError."""
        if self._closing is not None:
            raise draining_error()
        lane = self._lanes.get(create.stream_id)
        if lane is None:
            if create.stream_id is not None and len(self._lanes) - (None in self._lanes) >= MAX_LANES:
                message = f"A connection may have {MAX_LANES} different stream_ids."
                raise SocketError("websocket_stream_limit_reached", message)
            lane = self._lanes[create.stream_id] = Lane(self._parts, create.stream_id)
        if sum(len(lane.waiting) for lane in self._lanes.values()) >= MAX_WAITING:
            message = f"{MAX_WAITING} requests of this connection wait, which is the most that may."
            raise KvloomError(ErrorReason.ERROR_REASON_RATE_LIMITED, message, retry_after_seconds=1.0)
        self._parts.lease.take(create.num_bytes)
        lane.add(create)

    def _steer(self, data: bytes, fields: dict[str, msgspec.Raw]) -> None:
        named = {"previous_response_id": text_of(fields.get("previous_response_id"))}
        given = {**named, "input": fields.get("input", msgspec.Raw(b'""'))}
        try:
            message = msgspec.json.decode(data, type=SteerMessage)
        except msgspec.ValidationError as error:
            self._parts.send(failed(given, "invalid_input", str(error)))
            return
        lane = self._parts.running.get(message.previous_response_id)
        if lane is not None and message.input:
            lane.steer(Steer(message.previous_response_id, msgspec.Raw(bytes(fields["input"]))))
        elif lane is not None:
            self._parts.send(failed(given, "invalid_input", "input must not be empty."))
        elif message.previous_response_id in self._parts.ended:
            self._parts.send(failed(given, "response_already_completed", "The response has ended."))
        else:
            self._parts.send(failed(given, "response_not_found", "This connection has no such response."))
