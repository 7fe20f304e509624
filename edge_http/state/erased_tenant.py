"""Says whose objects an erasure concerns."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

from edge_http.edge import Edge
from edge_http.state.bodies import ErasureBody
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason


def erased_tenant(edge: Edge, request: web.BaseRequest, body: ErasureBody) -> Mapping[str, str]:
    """The tenant that the body names, if its key administers it, or else the caller. Raises KvloomError
    (PERMISSION_DENIED)."""
    own = edge.callers.caller_of(request)
    tenant = own if body.tenant is None else body.tenant
    if tenant != own and not _administers(edge, request, tenant):
        message = f"Your key does not administer the tenant {tenant[:128]!r}."
        raise KvloomError(ErrorReason.ERROR_REASON_PERMISSION_DENIED, message, field="tenant")
    return {"tenant": tenant}


def _administers(edge: Edge, request: web.BaseRequest, tenant: str) -> bool:
    principal = edge.callers.principal_of(request)
    if principal is None:
        return False
    return edge.callers.administered_by(principal) in (None, tenant.partition("/")[0])
