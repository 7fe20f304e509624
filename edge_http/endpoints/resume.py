"""GET /v1/chat/completions/{id}?stream=true&starting_after=N (and /v1/completions/{id}, /v1/responses/{id},
/v1/messages/{id}) resumes a stream. POST .../{id}/cancel cancels its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from aiohttp import web

from edge_http.edge import Edge
from edge_http.formatting.error_formats import error_format_of
from edge_http.resume.idempotent_answers import IdempotentAnswer, WholeBody
from edge_http.resume.remote_responses import FoundResponse
from edge_http.resume.response_name import ResponseName
from edge_http.resume.resumable_stream import ConnectionReader, ResumableStream
from edge_http.resume.table import not_kept, other_request
from edge_http.wire.headers import (
    IDEMPOTENCY_KEY,
    LAST_EVENT_ID,
    RELAYED,
    REPLAYED,
    REQUEST_ID,
    event_number,
    last_event_id,
    request_id,
)
from edge_http.wire.json_response import json_response
from edge_http.wire.large_body import PIECE_BYTES, write_large_body
from edge_http.wire.message_request import stream_for
from edge_http.wire.request_callers import credential_digest
from edge_http.wire.sse import EventStream, ReplayedEventStream
from kvloom.errors import invalid_argument

NO_HEADERS: Final[Mapping[str, str]] = {}
_RESPONSES: Final = "/v1/responses"
ID_PREFIXES: Final[Mapping[str, str]] = {
    "/v1/chat/completions": "chatcmpl-",
    "/v1/completions": "cmpl-",
    _RESPONSES: "resp_",
    "/v1/messages": "msg_",
}
"""The ids of each path's responses begin with these."""


async def resume_stream(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    """Deliver the events after the last one that the client has, then new ones as they arrive. If the stream has ended
    and the client has everything, the status is 204, which makes an EventSource stop reconnecting."""
    after = starting_after(request)
    response_id, caller = _response_id(request), credential_digest(request)
    stream = edge.resume.find(response_id, caller)
    if stream is None:
        kept = edge.idempotent_answers.find(response_id, caller) if RELAYED in request.headers else None
        if kept is not None:  # another edge got a repeat of the request
            return await deliver_kept(edge, request, kept, is_replay=True)
        found = await edge.remote_responses.find(request, response_id, caller, after)
        return await deliver_found(edge, request, found, after)
    edge.metrics.on_resumed()
    if stream.ended and after == stream.num_events:
        return web.Response(status=204)
    return await deliver(edge, request, stream, after)


async def cancel_response(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    """Cancel an answer. Without this, an abandoned answer continues until its grace period ends."""
    response_id = _response_id(request)
    stream = edge.resume.find(response_id, credential_digest(request))
    if stream is None:
        return await edge.remote_responses.cancel(request, response_id)
    edge.resume.cancel(stream)
    return json_response({"id": response_id, "cancelled": True})


async def deliver_found(
    edge: Edge, request: web.BaseRequest, found: FoundResponse, after: int, *, is_replay: bool = False
) -> web.StreamResponse:
    """Deliver what was found elsewhere: a complete HTTP response, or a stream that this edge continues from now on.
    `is_replay`: see `deliver`."""
    if isinstance(found, web.StreamResponse):
        return found
    if isinstance(found, IdempotentAnswer):
        return await deliver_kept(edge, request, found, is_replay=True)
    edge.metrics.on_resumed()
    return await deliver(edge, request, found, after, is_replay=is_replay)


async def deliver(
    edge: Edge, request: web.BaseRequest, stream: ResumableStream, after: int, *, is_replay: bool = False
) -> web.StreamResponse:
    """Write the events with numbers above `after` to this connection. `is_replay`: for a client that has repeated its
    request with its idempotency key. Raises KvloomError while nothing was sent."""
    if stream.is_attended:
        # This request may be read after its client has disconnected and resumed the stream over another connection,
        # which then keeps the stream. The event loop processes the disconnect after the request, and cancels this task.
        await asyncio.sleep(0)
        if edge.resume.find(stream.name.id, stream.name.caller) is not stream:
            raise not_kept()
    kind = stream_for(request, ReplayedEventStream if is_replay else EventStream)
    events = kind(request, edge.config.max_buffered_bytes, edge.write_coalescer, last_event_number=after)
    reader = ConnectionReader(events, error_format_of(request.path))
    stream.attach(reader)
    try:
        await stream.follow(reader, request.writer)
    except (asyncio.CancelledError, ConnectionError):
        edge.metrics.on_disconnect()
        raise
    finally:
        edge.metrics.on_replayed(reader.num_replayed)
    return events.response()


async def deliver_kept(
    edge: Edge, request: web.BaseRequest, kept: IdempotentAnswer, *, is_replay: bool
) -> web.StreamResponse:
    """Wait for an answer that is not streamed, and send it. Raises the KvloomError that it ended with."""
    if is_replay:
        edge.metrics.on_resumed()
    try:
        async with edge.idempotent_answers.attend(kept) as body:
            return await send_whole_body(edge, request, body, {REPLAYED: "true"} if is_replay else {})
    except (asyncio.CancelledError, ConnectionError):
        edge.metrics.on_disconnect()
        raise


async def send_whole_body(
    edge: Edge, request: web.BaseRequest, body: WholeBody, more_headers: Mapping[str, str] = NO_HEADERS
) -> web.StreamResponse:
    """Send the body of an answer that is not streamed."""
    headers = {**body.headers, **more_headers}
    if body.num_bytes <= PIECE_BYTES:
        return web.Response(body=b"".join(body.pieces), content_type="application/json", headers=headers)
    response = web.StreamResponse(headers={**headers, REQUEST_ID: request_id(request)})
    response.content_type = "application/json"
    await write_large_body(request, response, body.pieces, edge.admission.fair_yield)
    return response


async def find_idempotent(
    edge: Edge, request: web.BaseRequest, name: ResponseName, after: int | None = None
) -> FoundResponse | None:
    """Return what an earlier request with the same idempotency key began, here or at another edge. None: from now on
    the key, if there is one, stands for `name`. `after` is the last event that the client reports to have. Raises
    KvloomError."""
    if not name.idempotency_key:
        if after is not None:
            message = f"{LAST_EVENT_ID} requires GET, or the {IDEMPOTENCY_KEY} with which the stream was begun."
            raise invalid_argument(message, LAST_EVENT_ID)
        return None
    known = edge.find_by_key(name.tenant, name.idempotency_key)
    if known is not None and known.name.body_digest != name.body_digest:
        raise other_request()
    if isinstance(known, ResumableStream) and known.ended and known.has_failed and after is None:
        edge.resume.forget(known)  # a client that continues reading gets the error, one that starts again an answer
        known = None
    return known or await edge.remote_responses.find_by_key(request, name, after or 0)


def starting_after(request: web.BaseRequest) -> int:
    """Return the last event that the client has. The header takes precedence over the query: a browser's EventSource
    sends it when it reconnects with its original URL. Raises KvloomError (INVALID_ARGUMENT)."""
    if request.query.get("stream", "").lower() != "true":
        raise invalid_argument("Only streams can be resumed: set stream=true.", "stream")
    by_header = last_event_id(request)
    if by_header is not None:
        return by_header
    given = request.query.get("starting_after")
    if given is None:
        return 0
    # The Responses API counts its events from 0; all others, and the header, count from 1.
    return event_number(given, "starting_after") + request.path.startswith(_RESPONSES)


def _response_id(request: web.BaseRequest) -> str:
    """Return the id in the path. Each path accepts only ids of its own kind. Raises KvloomError."""
    path = request.path.removesuffix("/cancel")
    parent, _, response_id = path.rpartition("/")
    if not response_id.startswith(ID_PREFIXES[parent]):
        raise not_kept()
    return response_id
