"""Checks requests about stored objects, and asks the orchestrator."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
from aiohttp import web

from edge_http.edge import Edge
from edge_http.endpoints.not_served import refuse_operation, refuse_unserved
from edge_http.endpoints.ownership import owner_of
from edge_http.formatting.body_fields import BodyReader
from edge_http.openai.responses.input_items import check_items
from edge_http.openapi.route import Handler
from edge_http.orchestrator_link import CALL_SECONDS, OrchestratorLink
from edge_http.wire.body import read_json_body
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason

MAX_ID_CHARS: Final = 256
JSON_LINES: Final = "application/jsonl"


def _query(request: web.BaseRequest) -> dict[str, str]:
    """The parameters by name. Of a list, "NAME[]", the values are separated by commas."""
    query = request.rel_url.query
    return {
        name.removesuffix("[]"): ",".join(query.getall(name)) if name.endswith("[]") else query[name] for name in query
    }


def orchestrator_of(edge: Edge, request: web.BaseRequest) -> OrchestratorLink:
    """Raises KvloomError (NOT_IMPLEMENTED) without an orchestrator, as for all APIs that are not served."""
    if edge.orchestrator is None:
        refuse_operation(request.method, request.path)
        refuse_unserved(request.path, ())
        raise KvloomError(ErrorReason.ERROR_REASON_NOT_FOUND, "There is no orchestrator (orchestrator.enabled).")
    return edge.orchestrator


Prepare = Callable[[Edge, web.BaseRequest, Any], Mapping[str, str]]
"""Returns what an operation must know besides the request, from its body. Raises KvloomError."""


def operating(
    operation: str, path: str, body: Any = None, prepare: Prepare | None = None, seconds: float = CALL_SECONDS
) -> Handler:
    """The handler of a path that is an operation of the orchestrator, which has so much time. `body`: the type of the
    request's."""
    places = [number for number, part in enumerate(path.split("/")) if part.startswith("{")]
    reader = None if body is None else BodyReader(body)

    async def operate(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
        orchestrator = orchestrator_of(edge, request)
        segments = request.path.split("/")
        ids = [segments[place][:MAX_ID_CHARS] for place in places]
        caller = edge.callers.caller_of(request)
        with edge.admission.admit(caller):
            raw, query = b"", _query(request)
            if reader is not None:
                with edge.admission.bodies.lease(caller) as lease:
                    raw = await read_json_body(request, edge.config, lease)
                    checked = reader.read(raw, edge.fields, request.headers)
                for name in ("items", "input"):
                    if isinstance(items := getattr(checked, name, None), list):
                        check_items(items, name)
                if prepare is not None:
                    query |= prepare(edge, request, checked)
                raw = msgspec.json.encode(checked)
            answer = await orchestrator.operate(owner_of(edge, request), operation, ids, query, raw, seconds)
        return web.Response(body=answer, content_type="application/json")

    return operate


def exporting(operation: str, path: str) -> Handler:
    """The handler of a path whose answer is lines of JSON, as they come."""
    places = [number for number, part in enumerate(path.split("/")) if part.startswith("{")]

    async def export(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
        orchestrator = orchestrator_of(edge, request)
        segments = request.path.split("/")
        ids = [segments[place][:MAX_ID_CHARS] for place in places]
        with edge.admission.admit(edge.callers.caller_of(request)):
            pieces = orchestrator.export(owner_of(edge, request), operation, ids, _query(request))
            async with contextlib.aclosing(pieces):
                await anext(pieces)  # an error is answered as one
                response = web.StreamResponse(headers={"X-Content-Type-Options": "nosniff"})
                response.content_type = JSON_LINES
                await response.prepare(request)
                async for lines in pieces:
                    if lines:
                        await response.write(lines)
                await response.write_eof()
        return response

    return export
