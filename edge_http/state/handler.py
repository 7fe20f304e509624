"""Checks requests about stored objects, and asks the orchestrator."""

from __future__ import annotations

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
from edge_http.orchestrator_link import OrchestratorLink
from edge_http.wire.body import read_json_body
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason

MAX_ID_CHARS: Final = 256


def orchestrator_of(edge: Edge, request: web.BaseRequest) -> OrchestratorLink:
    """Raises KvloomError (NOT_IMPLEMENTED) without an orchestrator, as for all APIs that are not served."""
    if edge.orchestrator is None:
        refuse_operation(request.method, request.path)
        refuse_unserved(request.path, ())
        raise KvloomError(ErrorReason.ERROR_REASON_NOT_FOUND, "There is no orchestrator (orchestrator.enabled).")
    return edge.orchestrator


Prepare = Callable[[Edge, web.BaseRequest, Any], Mapping[str, str]]
"""Returns what an operation must know besides the request, from its body. Raises KvloomError."""


def operating(operation: str, path: str, body: Any = None, prepare: Prepare | None = None) -> Handler:
    """The handler of a path that is an operation of the orchestrator. `body`: the type of the request's."""
    places = [number for number, part in enumerate(path.split("/")) if part.startswith("{")]
    reader = None if body is None else BodyReader(body)

    async def operate(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
        orchestrator = orchestrator_of(edge, request)
        segments = request.path.split("/")
        ids = [segments[place][:MAX_ID_CHARS] for place in places]
        caller = edge.callers.caller_of(request)
        with edge.admit(caller):
            raw, query = b"", dict(request.rel_url.query)
            if reader is not None:
                with edge.bodies.lease(caller) as lease:
                    raw = await read_json_body(request, edge.config, lease)
                    checked = reader.read(raw, edge.fields, request.headers)
                if isinstance(items := getattr(checked, "items", None), list):
                    check_items(items, "items")
                if prepare is not None:
                    query |= prepare(edge, request, checked)
                raw = msgspec.json.encode(checked)
            answer = await orchestrator.operate(owner_of(edge, request), operation, ids, query, raw)
        return web.Response(body=answer, content_type="application/json")

    return operate
