"""Says who owns the stored objects that a request names or makes."""

from __future__ import annotations

from aiohttp import web

from edge_http.edge import Edge
from kvloom.v1.orchestrator_service_pb2 import Owner


def owner_of(edge: Edge, request: web.BaseRequest) -> Owner:
    """Who owns the objects that a request names or makes."""
    return Owner(tenant=edge.callers.caller_of(request), key_id=edge.callers.key_id_of(request))
