"""Who may use the paths of operators.

With tenants, keys with the scope admin: those of the operator's organisation see everything, others only what is their
organisation's. Without tenants nobody's key says that its holder is an operator; then only this machine is served.
"""

from __future__ import annotations

import ipaddress
from typing import Final

from aiohttp import web

from edge_http.edge import Edge
from edge_http.wire.json_response import json_response
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason

_OWN_HOSTS: Final = frozenset(("localhost", "127.0.0.1", "[::1]"))
_OWN_SITES: Final = (None, "same-origin", "none")
_FORWARDED: Final = ("X-Forwarded-For", "Forwarded", "X-Real-IP")


async def access(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    """Serve GET /admin/v1/access."""
    organisation = organisation_of(edge, request)
    return json_response(
        {"has_tenants": edge.callers.have_tenants, "is_operator": not organisation, "organisation": organisation}
    )


def organisation_of(edge: Edge, request: web.BaseRequest) -> str:
    """The organisation that the caller administers; "": the whole fabric. The caller has the scope admin, or there are
    no tenants."""
    principal = edge.callers.principal_of(request)
    return "" if principal is None else edge.callers.administered_by(principal) or ""


def check_own_machine(request: web.BaseRequest) -> None:
    """For a fabric without tenants. Pages of other sites, whose requests come from this machine's browser, are refused:
    by their origin, or by the name that they have for this address. Raises KvloomError (PERMISSION_DENIED)."""
    host = request.headers.get("Host", "")
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    is_here = not request.remote or ipaddress.ip_address(request.remote).is_loopback
    is_forwarded = any(header in request.headers for header in _FORWARDED)
    is_own_site = request.headers.get("Sec-Fetch-Site") in _OWN_SITES
    if not (is_here and not is_forwarded and is_own_site and name.lower() in _OWN_HOSTS):
        message = (
            "Without tenants, operators' paths are only for this machine, at http://localhost or http://127.0.0.1: use "
            "an SSH tunnel (docs/operate/admin-page.md)."
        )
        raise KvloomError(ErrorReason.ERROR_REASON_PERMISSION_DENIED, message)
