"""Background responses: how they are begun, read and cancelled, and how an edge generates one for an orchestrator."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Any, Final

import msgspec
from aiohttp import web

from edge_http.answers.streamed_answer import SLOW_CLIENT_LINGER_SECONDS
from edge_http.edge import Edge
from edge_http.endpoints.answering import schedule
from edge_http.endpoints.generation_job import GenerationJob
from edge_http.endpoints.ownership import owner_of
from edge_http.endpoints.resume import starting_after
from edge_http.endpoints.stored_input import StoredInput, input_items
from edge_http.formatting.error_formats import error_format_of
from edge_http.formatting.response_formatter import Envelope
from edge_http.openai.responses.file_search import FileSearch, with_found
from edge_http.openai.responses.formatter import LEADING
from edge_http.openai.responses.requests import StoredResponsesBody
from edge_http.openai.responses.response_object import ResponseObject
from edge_http.openai.responses.steady_formatter import RunName
from edge_http.wire.headers import PRIORITY_CLASS, RELAYED, REQUEST_ID, RESPONSE_ID, request_id
from edge_http.wire.request_callers import relayed_caller
from edge_http.wire.sse import EventStream
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.orchestrator_service_pb2 import BeginResponseRequest, KeepResponseRequest
from kvloom_common.trust.on_behalf import RUN

AWAY_SECONDS: Final = 60.0
"""How long a stream waits for an orchestrator that is away. Then its client has to come back."""
PAUSE_SECONDS: Final = 0.25


def run_of(request: web.BaseRequest) -> RunName | None:
    """The background response that an orchestrator wants to have generated; None: the request is of a client."""
    given = request.headers.get(RUN)
    if given is None or not relayed_caller(request):
        return None
    return msgspec.json.decode(given, type=RunName)


async def begin_background(
    edge: Edge,
    request: web.BaseRequest,
    raw: bytes,
    body: StoredResponsesBody,
    stored: StoredInput,
    job: GenerationJob,
    search: FileSearch | None = None,
) -> web.StreamResponse:
    """Have a response generated in the background. `search`: what was found in files. Raises KvloomError."""
    schedule(edge, request, job)
    assert edge.orchestrator is not None
    response_id = f"resp_{os.urandom(24).hex()}"
    envelope = Envelope(response_id, job.model.name, "", 1)
    response = ResponseObject(envelope, job.shape.options["echo"]).queued()
    fields: dict[str, Any] = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    for name in ("models", "background_options"):  # they have had their effect
        fields.pop(name, None)
    given, prompt = input_items(stored), stored.prompt
    earlier = stored.earlier if prompt is None else [*prompt.items, *stored.earlier]
    fields |= {"model": job.model.name, "stream": True, "input": [*earlier, *given]}
    if prompt is not None:  # it is part of the input from now on
        fields |= {"instructions": stored.echo["instructions"], "prompt": prompt.echo}
    if LEADING in job.shape.options:  # it stands for all of the input
        fields["input"] = job.shape.options[LEADING]
    else:
        fields.pop("context_management", None)
    if body.has_time:
        fields["service_tier"] = "flex"
    if search is not None:
        fields["tools"] = with_found(body.tools or (), search)
    kept = KeepResponseRequest(
        owner=owner_of(edge, request),
        response=response,
        input_items=map(bytes, stored.own_items),
        previous_response_id=stored.previous_response_id,
        conversation_id=body.conversation_id,
    )
    priority_class = "batch" if body.has_time else request.headers.get(PRIORITY_CLASS, "")
    await edge.orchestrator.begin_response(
        BeginResponseRequest(kept=kept, body=msgspec.json.encode(fields), priority_class=priority_class)
    )
    if body.stream:
        return await _follow(edge, request, response_id, 0)
    return web.Response(body=response, content_type="application/json", headers={RESPONSE_ID: response_id})


async def read_background(edge: Edge, request: web.BaseRequest, response_id: str) -> web.StreamResponse | None:
    """Deliver the events of a background response; None: it is none. Raises KvloomError."""
    num_known = starting_after(request)
    return await _unless_unknown(_follow(edge, request, response_id, num_known))


async def cancel_background(edge: Edge, request: web.BaseRequest) -> web.StreamResponse | None:
    """Cancel a background response; None: there is none of this name. Raises KvloomError."""
    if edge.orchestrator is None or RELAYED in request.headers or relayed_caller(request):
        return None
    response_id = request.path.split("/")[-2]

    async def cancelled(orchestrator: Any) -> web.StreamResponse:
        body = await orchestrator.operate(owner_of(edge, request), "cancelResponse", [response_id])
        return web.Response(body=body, content_type="application/json")

    return await _unless_unknown(cancelled(edge.orchestrator))


async def _unless_unknown(work: Any) -> web.StreamResponse | None:
    try:
        return await work
    except KvloomError as error:
        if error.reason != ErrorReason.ERROR_REASON_NOT_FOUND:
            raise
        return None


class _WatchedEvents:
    """A stream that is kept alive while its response waits (WatchedStream)."""

    def __init__(self, events: EventStream) -> None:
        self._events = events

    @property
    def num_events(self) -> int:
        return self._events.num_events

    @property
    def is_over(self) -> bool:
        return self._events.ended

    def begin_early(self) -> None:
        pass

    def keep_alive(self) -> None:
        self._events.comment(b": keep-alive\n")


async def _follow(edge: Edge, request: web.BaseRequest, response_id: str, num_known: int) -> web.StreamResponse:
    """Deliver the events after the first `num_known`, also if the orchestrator dies meanwhile. Raises KvloomError while
    nothing has been sent."""
    assert edge.orchestrator is not None
    owner = owner_of(edge, request)
    events = EventStream(request, edge.config.max_buffered_bytes, edge.write_coalescer, last_event_number=num_known)
    watched = _WatchedEvents(events)
    clock = asyncio.get_running_loop().time
    came_at = clock()
    try:
        while True:
            try:
                reading = edge.orchestrator.read_events(owner, response_id, events.num_events)
                async with contextlib.aclosing(reading):
                    async for piece in reading:
                        if not events.has_begun:
                            events.begin({REQUEST_ID: request_id(request), RESPONSE_ID: response_id})
                            edge.keep_alive.add(watched)
                        came_at = clock()
                        if piece:
                            events.replay(piece)
                            await request.writer.drain()
                break
            except KvloomError as error:
                if not events.has_begun:
                    raise
                is_away = error.reason == ErrorReason.ERROR_REASON_ORCHESTRATOR_UNAVAILABLE
                if not is_away or clock() - came_at > AWAY_SECONDS:
                    last = error_format_of(request.path).event(error, events.num_events)
                    events.break_off(last, SLOW_CLIENT_LINGER_SECONDS)
                    return events.response()
            await asyncio.sleep(PAUSE_SECONDS)
        events.end()
        return events.response()
    finally:
        edge.keep_alive.discard(watched)
