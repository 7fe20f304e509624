"""ControlService: what processes of the fabric ask."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any, Final

import structlog

from control.directory import keys
from control.replication.follower import Follower
from control.replication.versions import Versions
from control.service.metrics import FOLLOWERS, SNAPSHOTS
from control.usage.servicer import lease_budgets
from kvloom.errors import KvloomError, invalid_argument
from kvloom.transport.grpc_errors import abort
from kvloom.v1 import control_service_pb2_grpc
from kvloom.v1.control_service_pb2 import (
    FollowRequest,
    FollowResponse,
    KeyUse,
    LeaseBudgetsRequest,
    ReportKeyUsesRequest,
    ReportKeyUsesResponse,
)
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.database.database import DATABASE_ERRORS, Database, database_error

log = structlog.get_logger()

MAX_FOLLOWERS: Final = 4096


class ControlServicer(control_service_pb2_grpc.ControlServiceServicer):
    """Ends its streams when `versions` is closed."""

    def __init__(self, database: Database, versions: Versions) -> None:
        self._database = database
        self._versions = versions
        self._num_followers = 0

    async def Follow(self, request: FollowRequest, context: Any) -> None:
        if self._num_followers >= MAX_FOLLOWERS:
            message = f"{MAX_FOLLOWERS} processes follow the table already."
            await abort(context, KvloomError(ErrorReason.ERROR_REASON_OVERLOADED, message))
        self._num_followers += 1
        try:
            # The follower learns at once that it is connected, also if nothing has changed.
            await context.send_initial_metadata(())
            with FOLLOWERS.track_inprogress():
                await self._send(Follower(self._database, self._versions, request.table_id, request.version), context)
        except DATABASE_ERRORS as error:
            await abort(context, database_error("Follow", error))
        finally:
            self._num_followers -= 1
        await abort(context, stopping())

    async def _send(self, follower: Follower, context: Any) -> None:
        response: FollowResponse
        async for response in follower.responses():
            if response.begins_snapshot:
                SNAPSHOTS.inc()
            await context.write(response)

    async def LeaseBudgets(self, request_iterator: AsyncIterator[LeaseBudgetsRequest], context: Any) -> None:
        try:
            await lease_budgets(self._database, self._until_closed(request_iterator), context)
        except DATABASE_ERRORS as error:
            await abort(context, database_error("LeaseBudgets", error))
        if self._versions.is_closed:
            await abort(context, stopping())

    async def _until_closed(self, requests: AsyncIterator[LeaseBudgetsRequest]) -> AsyncIterator[LeaseBudgetsRequest]:
        """Routers keep their streams open, but a service that stops must not wait for them."""
        closed = asyncio.create_task(self._versions.closed.wait(), name="end of leases")
        try:
            while not closed.done():
                reading = asyncio.ensure_future(anext(requests, None))
                try:
                    await asyncio.wait((reading, closed), return_when=asyncio.FIRST_COMPLETED)
                    request = reading.result() if reading.done() else None
                finally:
                    reading.cancel()
                if request is None:
                    return
                yield request
        finally:
            closed.cancel()

    async def ReportKeyUses(self, request: ReportKeyUsesRequest, context: Any) -> ReportKeyUsesResponse:
        try:
            if len(request.uses) > keys.MAX_USES:
                raise invalid_argument(f"There are at most {keys.MAX_USES} in a batch.", "uses")
            await self._database.uninterrupted(self._note_uses(request.uses))
        except KvloomError as error:
            await abort(context, error)
        except DATABASE_ERRORS as error:
            await abort(context, database_error("ReportKeyUses", error))
        return ReportKeyUsesResponse()

    async def _note_uses(self, uses: Iterable[KeyUse]) -> None:
        async with self._database.writing() as connection:
            await keys.report_uses(connection, ((use.key_id, use.at) for use in uses), time.time())


def stopping() -> KvloomError:
    return KvloomError(ErrorReason.ERROR_REASON_DRAINING, "The control service is stopping.")
