"""kvloom.v1.UsageService, and ControlService.LeaseBudgets."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc

from control.usage.leases import ProducerClosedError, change_leases
from control.usage.report import answers_of, budgets_of, usage_of
from kvloom.errors import KvloomError, invalid_argument
from kvloom.transport.grpc_errors import abort
from kvloom.v1 import usage_service_pb2 as pb
from kvloom.v1 import usage_service_pb2_grpc
from kvloom.v1.control_service_pb2 import LeaseBudgetsRequest, LeaseBudgetsResponse
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.database.database import DATABASE_ERRORS, Database, database_error

MAX_CHANGES: Final = 1024
"""In one request."""
MAX_NAME_CHARS: Final = 256

Context = grpc.aio.ServicerContext[Any, Any]


class UsageServicer(usage_service_pb2_grpc.UsageServiceServicer):
    def __init__(self, database: Database) -> None:
        self._database = database

    async def GetUsage(self, request: pb.GetUsageRequest, context: Context) -> pb.GetUsageResponse:
        try:
            return await self._database.uninterrupted(usage_of(self._database, request))
        except ValueError as error:
            await abort(context, invalid_argument(str(error), "group_by"))
        except DATABASE_ERRORS as error:
            await abort(context, database_error("GetUsage", error))

    async def GetBudgets(self, request: pb.GetBudgetsRequest, context: Context) -> pb.GetBudgetsResponse:
        if not request.tenant:
            await abort(context, invalid_argument("tenant is required.", "tenant"))
        try:
            asked = budgets_of(self._database, request.tenant, request.key_id, time.time())
            budgets = await self._database.uninterrupted(asked)
        except DATABASE_ERRORS as error:
            await abort(context, database_error("GetBudgets", error))
        return pb.GetBudgetsResponse(budgets=budgets)

    async def ListAnswers(self, request: pb.ListAnswersRequest, context: Context) -> None:
        try:
            async for answers in answers_of(self._database, request):
                await context.write(pb.ListAnswersResponse(answers=answers))
        except DATABASE_ERRORS as error:
            await abort(context, database_error("ListAnswers", error))


async def lease_budgets(database: Database, requests: AsyncIterator[LeaseBudgetsRequest], context: Context) -> None:
    """The RPC. A router that was declared dead gets PERMISSION_DENIED: its leases are closed, and it must start again
    under another name before it may spend anything."""
    producer = ""
    async for request in requests:
        producer = producer or request.producer
        if not producer or len(producer) > MAX_NAME_CHARS:
            await abort(context, invalid_argument("The first request must name the producer.", "producer"))
        if len(request.changes) > MAX_CHANGES:
            await abort(context, invalid_argument(f"changes may have at most {MAX_CHANGES} entries.", "changes"))
        if not all(change.number for change in request.changes):
            await abort(context, invalid_argument("Every change must have a number above 0.", "changes.number"))
        try:
            grants = await database.uninterrupted(change_leases(database, producer, request.changes))
        except ProducerClosedError:
            message = f"{producer} has ended: all of its usage records are known."
            await abort(context, KvloomError(ErrorReason.ERROR_REASON_PERMISSION_DENIED, message))
        await context.write(LeaseBudgetsResponse(grants=grants))
