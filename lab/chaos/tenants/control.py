"""Asks the control service of the fabric under test, which may be away."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc
import grpc.aio

from kvloom.transport.grpc_errors import error_from_peer
from kvloom.v1 import directory_service_pb2, directory_service_pb2_grpc, usage_service_pb2, usage_service_pb2_grpc
from lab.chaos.fabric.cluster import Cluster
from tools.failures import CommandError

_CALL_SECONDS: Final = 3.0
_PATIENCE_SECONDS: Final = 60.0
_RETRY_SECONDS: Final = 0.25
_METADATA: Final = (("kvloom-actor", "chaos"),)
_LIST_SECONDS: Final = 60.0


class ControlDesk:
    """Every call is tried again until the service is back, so it may be carried out twice."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def change(self, method: str, **fields: Any) -> Any:
        """Call a method of DirectoryService. Raises KvloomError and CommandError."""
        request = getattr(directory_service_pb2, f"{method}Request")(**fields)
        return await self._ask(directory_service_pb2_grpc.DirectoryServiceStub, method, request)

    async def budgets(self, tenant: str) -> list[usage_service_pb2.BudgetState]:
        """Returns the budgets of the tenant and its organisation. Raises KvloomError and CommandError."""
        request = usage_service_pb2.GetBudgetsRequest(tenant=tenant)
        return list((await self._ask(usage_service_pb2_grpc.UsageServiceStub, "GetBudgets", request)).budgets)

    async def answers(self) -> list[usage_service_pb2.MeteredAnswer]:
        """All that were metered. Raises CommandError."""
        found: list[usage_service_pb2.MeteredAnswer] = []
        try:
            async with self._channel() as channel:
                stub: Any = usage_service_pb2_grpc.UsageServiceStub(channel)
                async for page in stub.ListAnswers(usage_service_pb2.ListAnswersRequest(), timeout=_LIST_SECONDS):
                    found.extend(page.answers)
        except grpc.aio.AioRpcError as error:
            raise CommandError(f"control has not answered: {error.details()}") from error
        return found

    async def _ask(self, make_stub: Any, method: str, request: Any) -> Any:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                async with self._channel() as channel:
                    call = getattr(make_stub(channel), method)
                    return await call(request, timeout=_CALL_SECONDS, metadata=_METADATA)
            except grpc.aio.AioRpcError as error:
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    raise error_from_peer(error) or CommandError(f"{method}: {error.details()}") from error
                if time.monotonic() > deadline:
                    raise CommandError(f"control was away for {_PATIENCE_SECONDS:g} s: {error.details()}") from error
            await asyncio.sleep(_RETRY_SECONDS)

    @contextlib.asynccontextmanager
    async def _channel(self) -> AsyncIterator[grpc.aio.Channel]:
        (name,) = self._cluster.names("control")
        async with self._cluster.trust.open_channel(self._cluster.status(name).address, "control", name) as channel:
            yield channel
