"""Requests that the orchestrator sends on behalf of a tenant, to the port of an edge for its fabric."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from edge_http.wire.request_callers import RequestCallers
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.trust.fabric_trust import FabricTrust
from kvloom_common.trust.on_behalf import KEY_ID, MAY_SPEAK, TENANT

Check = Callable[[web.BaseRequest], Awaitable[None] | None]


def checking(callers: RequestCallers, trust: FabricTrust) -> Check:
    """Returns what checks callers as `RequestCallers.check` does, and believes an orchestrator for whom it asks."""

    def check(request: web.BaseRequest) -> Awaitable[None] | None:
        tenant = request.headers.get(TENANT)
        if tenant is None:
            return callers.check(request)
        tls = request.get_extra_info("ssl_object")
        if not trust.may_connect(MAY_SPEAK, None if tls is None else tls.getpeercert()):
            message = "Only an orchestrator may ask on behalf of others."
            raise KvloomError(ErrorReason.ERROR_REASON_PERMISSION_DENIED, message)
        callers.accept_on_behalf(request, tenant, request.headers.get(KEY_ID, ""))
        return None

    return check
