"""The fleet and its requests, asked of all routers; the page reads them as a stream of events."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

from aiohttp import web

from edge_http.edge import Edge
from edge_http.formatting.json_bytes import encode_json
from edge_http.operating.access import organisation_of
from edge_http.wire.json_response import json_response
from kvloom.errors import KvloomError, invalid_argument
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.overview_pb2 import ExplainRequestRequest, GetOverviewRequest
from kvloom_common.metrics.series import LATENCY_SECONDS
from kvloom_common.overview.merge import merged
from kvloom_common.overview.time_parts import where_time_went
from kvloom_common.transport.plain_messages import as_plain

EVENT_SECONDS: Final = 2.0
MAX_WATCHERS: Final = 16
MAX_REQUESTS: Final = 1000
DEFAULT_REQUESTS: Final = 50


async def overview(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    """Serve GET /admin/v1/overview."""
    return json_response(await _overview(edge, request, _wanted(edge, request)))


async def overview_events(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    """Serve GET /admin/v1/overview/events: an overview every EVENT_SECONDS, with the samples that are new. It ends with
    the caller's right to see it."""
    wanted = _wanted(edge, request)
    if edge.num_watchers >= MAX_WATCHERS:
        message = f"{MAX_WATCHERS} pages watch this edge, which is the most."
        raise KvloomError(ErrorReason.ERROR_REASON_RATE_LIMITED, message, retry_after_seconds=EVENT_SECONDS)
    edge.num_watchers += 1
    try:
        found = await _overview(edge, request, wanted)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        while True:
            await response.write(b"data: " + encode_json(found) + b"\n\n")
            samples = found["samples"]
            wanted.samples_after_seconds = samples[-1]["at_seconds"] if samples else wanted.samples_after_seconds
            await asyncio.sleep(EVENT_SECONDS)
            if edge.admission.draining or edge.admission.leaving:
                return response
            try:
                if (check := edge.callers.check(request)) is not None:
                    await check
                found = await _overview(edge, request, wanted)
            except KvloomError as error:
                await response.write(b"event: error\ndata: " + encode_json({"message": error.message}) + b"\n\n")
                return response
    finally:
        edge.num_watchers -= 1


async def explained_request(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    """Serve GET /admin/v1/requests/{id}: by its own id, or by the x-request-id that its caller chose."""
    name = request.path.removeprefix("/admin/v1/requests/")
    organisation = organisation_of(edge, request)
    try:
        found = await edge.link.ask_all(
            "ExplainRequest", ExplainRequestRequest(request_id=name, organisation=organisation)
        )
    except KvloomError as error:
        if error.reason != ErrorReason.ERROR_REASON_NOT_FOUND:
            raise
        by_client = ExplainRequestRequest(client_request_id=name, organisation=organisation)
        found = await edge.link.ask_all("ExplainRequest", by_client)
    explanation = found[0].explanation
    went = where_time_went(explanation, edge.metrics.seconds_of(explanation.request_id))
    return json_response({"explanation": as_plain(explanation), "time": went})


def _wanted(edge: Edge, request: web.BaseRequest) -> GetOverviewRequest:
    """Raises KvloomError (INVALID_ARGUMENT)."""
    for name in request.query:
        if name not in ("max_requests", "samples_after"):
            raise invalid_argument(f"There is no parameter {name[:64]!r}.", name[:64])
    text = request.query.get("max_requests", str(DEFAULT_REQUESTS))
    if not (text.isdecimal() and len(text) < 5 and int(text) <= MAX_REQUESTS):
        raise invalid_argument(f"max_requests must be a number from 0 to {MAX_REQUESTS}.", "max_requests")
    try:
        after = float(request.query.get("samples_after", "0"))
    except ValueError:
        raise invalid_argument("samples_after must be a number of seconds.", "samples_after") from None
    return GetOverviewRequest(
        organisation=organisation_of(edge, request), max_requests=int(text), samples_after_seconds=after
    )


async def _overview(edge: Edge, request: web.BaseRequest, wanted: GetOverviewRequest) -> dict[str, Any]:
    wanted.organisation = organisation_of(edge, request)  # which may have changed since the last event
    fleet = merged(await edge.link.ask_all("GetOverview", wanted))
    most = wanted.max_requests
    return {
        "at_seconds": time.time(),
        "routers": [
            {
                "router_id": one.router_id,
                "draining": one.draining,
                "num_live_requests": one.num_live_requests,
                "num_queued_requests": one.num_queued_requests,
            }
            for one in fleet.routers
        ],
        "shards": list(map(as_plain, fleet.shards)),
        "running": list(map(as_plain, fleet.running[:most])),
        "ended": list(map(as_plain, fleet.ended[:most])),
        "samples": list(map(as_plain, fleet.samples)),
        "ttft_bounds": LATENCY_SECONDS,
    }
