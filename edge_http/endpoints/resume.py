"""GET /v1/chat/completions/{id}?stream=true&starting_after=N (and /v1/completions/{id}): take a stream up again.
POST .../{id}/cancel: end it for good."""

from __future__ import annotations

import asyncio

from aiohttp import web

from edge_http.edge import Edge
from edge_http.resume.response_name import ResponseName
from edge_http.resume.resumable_stream import ConnectionReader, ResumableStream
from edge_http.resume.table import not_kept, other_request
from edge_http.wire.caller import caller_of
from edge_http.wire.headers import (
    IDEMPOTENCY_KEY,
    LAST_EVENT_ID,
    event_number,
    last_event_id,
)
from edge_http.wire.json_response import json_response
from edge_http.wire.sse import EventStream
from kvloom.errors import invalid_argument


async def resume_stream(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    """The events behind the last one that the client has, and then those that come. 204 when there is none and none
    will come, which ends the attempts of an EventSource."""
    after = _starting_after(request)
    response_id, caller = _response_id(request), caller_of(request)
    stream = edge.resume.find(response_id, caller)
    if stream is None:
        found = await edge.remote_responses.find(request, response_id, caller, after)
        return await deliver_found(edge, request, found, after)
    edge.metrics.on_resumed()
    if stream.ended and after == stream.num_events:
        return web.Response(status=204)
    return await deliver(edge, request, stream, after)


async def cancel_response(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    """Without this, an answer that its client gave up goes on until its grace period is over."""
    response_id = _response_id(request)
    stream = edge.resume.find(response_id, caller_of(request))
    if stream is None:
        return await edge.remote_responses.cancel(request, response_id)
    edge.resume.cancel(stream)
    return json_response({"id": response_id, "cancelled": True})


async def deliver_found(
    edge: Edge, request: web.BaseRequest, found: web.StreamResponse | ResumableStream, after: int
) -> web.StreamResponse:
    """What a search elsewhere led to: an answer, or a stream that goes on here now."""
    if isinstance(found, web.StreamResponse):
        return found
    edge.metrics.on_resumed()
    return await deliver(edge, request, found, after)


async def deliver(edge: Edge, request: web.BaseRequest, stream: ResumableStream, after: int) -> web.StreamResponse:
    """Write the events after that number to this connection. Raises KvloomError as long as nothing was sent."""
    if stream.is_attended:
        # A request may be read when its client has gone, and come back by another connection: that one keeps the
        # stream. The event loop gets to know of it behind the request, and cancels this.
        await asyncio.sleep(0)
        if edge.resume.find(stream.name.id, stream.name.caller) is not stream:
            raise not_kept()
    events = EventStream(request, edge.config.max_buffered_bytes, edge.write_coalescer, after)
    reader = ConnectionReader(events)
    stream.attach(reader)
    try:
        await stream.follow(reader, request.writer)
    except (asyncio.CancelledError, ConnectionError):
        edge.metrics.on_disconnect()
        raise
    finally:
        edge.metrics.on_replayed(reader.num_replayed)
    return events.response()


def begun_before(edge: Edge, name: ResponseName, after: int | None) -> ResumableStream | None:
    """The stream that an earlier request with the same idempotency key began; None when this edge knows of none.
    `after`: the last event that the client says it has. Raises KvloomError."""
    if not name.idempotency_key:
        if after is not None:
            message = f"{LAST_EVENT_ID} goes with GET, or with the {IDEMPOTENCY_KEY} that the stream was begun with."
            raise invalid_argument(message, LAST_EVENT_ID)
        return None
    stream = edge.resume.find_by_key(name.caller, name.idempotency_key)
    if stream is None:
        return None
    if stream.name.body_digest != name.body_digest:
        raise other_request()
    edge.metrics.on_resumed()
    return stream


def _starting_after(request: web.BaseRequest) -> int:
    """The header wins: a browser's EventSource sends it with the URL that it was made with."""
    if request.query.get("stream", "").lower() != "true":
        raise invalid_argument("Only streams can be taken up again: ask with stream=true.", "stream")
    by_header = last_event_id(request)
    return event_number(request.query.get("starting_after", "0"), "starting_after") if by_header is None else by_header


def _response_id(request: web.BaseRequest) -> str:
    """/v1/chat/completions/{id} and /v1/completions/{id}, each for its own kind of ids."""
    path = request.path.removesuffix("/cancel")
    parent, _, response_id = path.rpartition("/")
    if response_id.startswith("chatcmpl-") != (parent == "/v1/chat/completions"):
        raise not_kept()
    return response_id
