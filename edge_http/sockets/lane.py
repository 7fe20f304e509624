"""A lane of a WebSocket: the requests with the same `stream_id`, or with none. They are answered in order."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import msgspec
import structlog
from aiohttp import web

from edge_http.answers.streamed_answer import StreamedAnswer
from edge_http.formatting.json_bytes import Json
from edge_http.sockets.lineage import Lineage
from edge_http.sockets.messages import Create, Steer
from edge_http.sockets.steering import MAX_STEERS, accepted, can_be_steered, failed, pending, required_input, successor
from edge_http.wire.json_response import error_response
from edge_http.wire.message_request import MessageRequest, MessageStream
from edge_http.wire.request_record import RequestRecord
from edge_http.wire.socket_frames import POLICY_VIOLATION, close_at_once, error_message, write_message
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.limits.byte_budget import ByteLease
from kvloom_common.process.request_context import current_request

log = structlog.get_logger()

MAX_ACTIVE: Final = 16
"""Requests of a connection that are answered at a time. Others wait."""
MAX_ENDED: Final = 1024
"""Responses of a connection of which is known that they have ended."""
_OF_BODY: Final = ("content-type", "content-length", "connection")


class _Ended(msgspec.Struct):
    id: str
    output: list[msgspec.Raw]
    status: str
    store: bool | None = None
    incomplete_details: Json | None = None

    @property
    def required(self) -> list[Json]:
        """The inputs that its client owes it. A response that was cut off is continued without."""
        return required_input(self.output) if self.status == "completed" else []


class _LastEvent(msgspec.Struct):
    type: str
    response: _Ended | None = None


class LaneParts:
    """The parts of a WebSocket that its lanes share."""

    def __init__(
        self,
        handshake: web.BaseRequest,
        serve: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        lineage: Lineage,
        lease: ByteLease,
        max_buffered_bytes: int,
    ) -> None:
        """`serve` answers a request as if it had come over HTTP. `lease`: for the messages that wait."""
        self.handshake = handshake
        self.serve = serve
        self.lineage = lineage
        self.lease = lease
        self.active = asyncio.Semaphore(MAX_ACTIVE)
        self.running: dict[str, Lane] = {}
        """By the ids of their responses."""
        self.ended: OrderedDict[str, None] = OrderedDict()
        """The ids of responses that have ended."""
        self._max_buffered_bytes = max_buffered_bytes

    def send(self, message: Json) -> None:
        write_message(self.handshake.transport, message, self._max_buffered_bytes)

    def refuse(self, error: KvloomError, stream_id: str | None = None) -> None:
        """Tell of an error that concerns a message alone."""
        self.send(refusal(error_response(error), stream_id))

    def release(self, num_bytes: int) -> None:
        """So many bytes wait no longer."""
        self.lease.resize(self.lease.num_bytes - num_bytes)


def refusal(response: web.Response, stream_id: str | None, previous_response_id: str = "") -> Json:
    """The message for an error response."""
    assert isinstance(response.body, bytes)
    error: Json = msgspec.json.decode(response.body)["error"]
    if previous_response_id and error.get("param") == "previous_response_id":
        error["code"] = "previous_response_not_found"  # clients send the whole conversation then
    record = current_request()
    shown = {**response.headers, **(record.response_headers() if isinstance(record, RequestRecord) else {})}
    headers = {name: value for name, value in shown.items() if name.lower() not in _OF_BODY}
    return error_message(error, stream_id, response.status, headers)


class Lane:
    """The requests that wait, and the one that is being answered."""

    def __init__(self, parts: LaneParts, stream_id: str | None) -> None:
        self.waiting: deque[Create] = deque()
        self.task: asyncio.Task[None] | None = None
        """Runs while there are requests."""
        self._parts = parts
        self._stream_id = stream_id
        self._create: Create | None = None
        self._request: MessageRequest | None = None
        """These two are being answered."""
        self._steers: list[Steer] = []
        """The messages that are added to the response that is being generated."""
        self._pending: dict[str, Sequence[Steer]] = {}
        """By response: added messages that wait for what it needs of its client."""

    def add(self, create: Create) -> None:
        self.waiting.append(create)
        if self.task is None or self.task.done():
            self.task = asyncio.create_task(self._run(), name="lane of a WebSocket")

    async def _run(self) -> None:
        while self.waiting:
            async with self._parts.active:
                create = self.waiting.popleft()
                self._parts.release(create.num_bytes)
                create.steers = (*self._pending.pop(create.previous_response_id, ()), *create.steers)
                await self._answer(create)

    async def _answer(self, create: Create) -> None:
        parts, request = self._parts, None
        try:
            body = msgspec.json.encode(parts.lineage.body_of(create))
            request = MessageRequest(parts.handshake, body, self._stream_id, self._on_begun, generates=create.generates)
            self._create, self._request, self._steers = create, request, []
            response = await parts.serve(request)
        except ConnectionError:  # the client has gone, which also ends this task
            return
        except Exception as error:
            log.exception("connection_failed", exc_info=error)
            message = "Something went wrong on our side."
            response = error_response(KvloomError(ErrorReason.ERROR_REASON_INTERNAL, message))
        finally:
            events = None if request is None else request.events
            self._create = self._request = None
            if events is not None:
                parts.running.pop(events.response_id, None)
        if isinstance(response, web.Response):
            self._refused(create, response)
        elif events is not None:
            self._ended(create, events)

    def _on_begun(self) -> None:
        assert self._request is not None
        assert self._request.events is not None
        self._parts.running[self._request.events.response_id] = self

    def _refused(self, create: Create, response: web.Response) -> None:
        """Its client gets back what it has added to the response before."""
        message = refusal(response, self._stream_id, create.previous_response_id)
        for steer in create.steers:
            self._give_back(steer, "successor_creation_failed", message["error"]["message"])
        if "input" in create.fields or not create.steers:
            self._send(message)
        record = current_request()
        if isinstance(record, RequestRecord):
            record.end(response.status)
        if response.status == 401 and self._parts.handshake.transport is not None:
            close_at_once(self._parts.handshake.transport, POLICY_VIOLATION)

    def _ended(self, create: Create, events: MessageStream) -> None:
        parts = self._parts
        for steer in create.steers:
            parts.release(len(bytes(steer.input)))
        parts.ended[events.response_id] = None
        if len(parts.ended) > MAX_ENDED:
            parts.ended.popitem(last=False)
        last = msgspec.json.decode(events.last, type=_LastEvent) if events.last else _LastEvent("")
        ended, steers = last.response, self._steers
        self._steers = []
        if ended is None or last.type not in ("response.completed", "response.incomplete"):
            for steer in steers:
                self._give_back(steer, "response_not_active", "The response has failed.", events.num_events)
            return
        if not ended.store:
            parts.lineage.add(ended.id, create, ended.output)
        if steers and (required := ended.required):
            self._pending[ended.id] = steers
            for steer in steers:
                self._send(pending(steer, required, events.num_events))
        elif steers:
            self.waiting.appendleft(successor(create, ended.id, steers))

    # -- steering -----------------------------------------------------------------------------------------------------

    def steer(self, steer: Steer) -> None:
        """Queue messages for the response that is being generated, and end it if it may end here."""
        create, request, size = self._create, self._request, len(bytes(steer.input))
        assert create is not None
        assert request is not None
        assert request.events is not None
        number = request.events.num_events
        unnamed = {"previous_response_id": steer.previous_response_id, "input": steer.input}
        if not can_be_steered(create):
            message = "A response of a conversation, or with context_management, cannot be steered."
            self._send(failed(unnamed, "steering_not_supported", message, number))
            return
        too_many = f"At most {MAX_STEERS} may wait for a response." if len(self._steers) >= MAX_STEERS else ""
        try:
            self._parts.lease.take(0 if too_many else size)
        except KvloomError as error:
            too_many = error.message
        if too_many:
            self._send(failed(unnamed, "too_many_pending_steers", too_many, number))
            return
        self._steers.append(steer)
        self._send(accepted(steer, number))
        if isinstance(request.events.answer, StreamedAnswer):
            request.events.answer.cut_short()

    def _give_back(self, steer: Steer, code: str, message: str, number: int = 0) -> None:
        self._parts.release(len(bytes(steer.input)))
        self._send(failed({**steer.named, "input": steer.input}, code, message, number))

    def _send(self, message: dict[str, Any]) -> None:
        self._parts.send(message if self._stream_id is None else {**message, "stream_id": self._stream_id})
