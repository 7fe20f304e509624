"""Answers administrators."""

from __future__ import annotations

from aiohttp import web

from edge_http.admin.routes import BY_PATH, template_of
from edge_http.edge import Edge
from edge_http.wire.body import read_json_body
from edge_http.wire.json_response import json_response
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason


async def administer(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    """Serve a path of ADMIN_ROUTES."""
    principal = edge.callers.principal_of(request)
    if principal is None:
        message = "This path does not exist: the fabric has no tenants (control.enabled is false)."
        raise KvloomError(ErrorReason.ERROR_REASON_NOT_FOUND, message)
    # Only here, because a fabric without tenants needs nothing of it.
    from edge_http.admin.calls import call_directory

    raw_path = request.rel_url.raw_path
    template = template_of(raw_path)
    assert template is not None, "the routing table has this path"
    route = BY_PATH[template][request.method]
    body = b""
    if route.body is not None and request.can_read_body:
        caller = edge.callers.caller_of(request)
        with edge.admission.admit(caller), edge.admission.bodies.lease(caller) as lease:
            body = await read_json_body(request, edge.config, lease)
    metadata = [("kvloom-actor", f"key:{principal.key_id}".encode("ascii", "replace").decode())]
    organisation = edge.callers.administered_by(principal)
    if organisation is not None:
        metadata.append(("kvloom-actor-organisation", organisation))
    query = request.rel_url.query
    return json_response(await call_directory(edge.callers.control_channel, route, raw_path, query, body, metadata))
