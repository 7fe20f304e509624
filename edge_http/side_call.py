"""Limits of calls that compute no answer, such as tokenizing: they count like requests, and so do the tokens that they
read."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from aiohttp import web

from edge_http.edge import Edge
from edge_http.wire.request_record import note_limits
from kvloom.v1.router_service_pb2 import ChargeCallRequest
from kvloom_common.models.model_routes import BYTES_PER_TOKEN


class SideCall:
    """`num_tokens`: what the call has read; None until it is known, and then what was expected counts."""

    def __init__(self) -> None:
        self.num_tokens: int | None = None


@contextlib.asynccontextmanager
async def side_call(edge: Edge, request: web.BaseRequest, num_bytes: int) -> AsyncIterator[SideCall]:
    """Charge a call to read a text of so many bytes, before it is read, and correct that at the end. Raises KvloomError
    (RATE_LIMITED, REQUEST_TOO_LARGE, OVERLOADED, ROUTER_LOST)."""
    call = SideCall()
    principal = edge.callers.principal_of(request)
    if principal is None or not edge.callers.have_limits(principal):
        yield call
        return
    expected = max(1, num_bytes // BYTES_PER_TOKEN)
    wanted = ChargeCallRequest(tenant=principal.tenant, key_id=principal.key_id, num_tokens=expected)
    answer = await edge.link.charge_call(wanted)
    if answer.HasField("limits"):
        note_limits(answer.limits)
    yield call
    more = 0 if call.num_tokens is None else call.num_tokens - expected
    if more:
        await edge.link.charge_call(
            ChargeCallRequest(tenant=principal.tenant, key_id=principal.key_id, num_more_tokens=more)
        )
