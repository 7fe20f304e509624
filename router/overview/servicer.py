"""kvloom.v1.OverviewService, for processes of the fabric."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, NoReturn, TypeVar

import grpc.aio
import structlog

from kvloom.errors import KvloomError
from kvloom.transport.grpc_errors import abort
from kvloom.v1 import overview_pb2_grpc
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.overview_pb2 import (
    ExplainRequestRequest,
    ExplainRequestResponse,
    GetOverviewRequest,
    GetOverviewResponse,
    GetStartsRequest,
    GetStartsResponse,
)
from router.overview.overview import Overview

log = structlog.get_logger()

Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")


class OverviewServicer(overview_pb2_grpc.OverviewServiceServicer):
    """`overview`: None at a listener for clients, to whom every call fails."""

    def __init__(self, overview: Overview | None) -> None:
        self._overview = overview

    async def GetOverview(self, request: GetOverviewRequest, context: Context) -> GetOverviewResponse:
        return await _answered((await self._known(context)).get_overview(request), context)

    async def ExplainRequest(self, request: ExplainRequestRequest, context: Context) -> ExplainRequestResponse:
        return await _answered((await self._known(context)).explain_request(request), context)

    async def GetStarts(self, request: GetStartsRequest, context: Context) -> GetStartsResponse:
        return await _answered((await self._known(context)).get_starts(request), context)

    async def _known(self, context: Context) -> Overview:
        if self._overview is None:
            message = "Only processes of the fabric may ask for this."
            await abort(context, KvloomError(ErrorReason.ERROR_REASON_PERMISSION_DENIED, message))
        return self._overview


async def _answered(answer: Awaitable[T], context: Context) -> T:
    try:
        return await answer
    except KvloomError as error:
        await abort(context, error)
    except Exception:
        await _abort_internal(context)


async def _abort_internal(context: Context) -> NoReturn:
    log.exception("rpc_failed", rpc="OverviewService")
    await abort(context, KvloomError(ErrorReason.ERROR_REASON_INTERNAL, "The router failed on this request."))
