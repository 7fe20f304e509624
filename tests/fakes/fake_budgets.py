"""A control service that leases budgets, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from kvloom.v1 import control_service_pb2_grpc
from kvloom.v1.control_service_pb2 import (
    BUDGET_UNIT_NANOS,
    BUDGET_UNIT_TOKENS,
    BudgetGrant,
    LeaseBudgetsRequest,
    LeaseBudgetsResponse,
)
from router.core.lease_messages import LeaseKind, LeaseName, LeaseWant
from tools.simulate.lease_owners import BudgetOwner, SimulatedBudget

_KINDS: dict[int, LeaseKind] = {BUDGET_UNIT_NANOS: LeaseKind.MONTH_NANOS, BUDGET_UNIT_TOKENS: LeaseKind.DAY_TOKENS}


class FakeBudgets(control_service_pb2_grpc.ControlServiceServicer):
    """Every budget has the same limit."""

    def __init__(self, limit: int) -> None:
        self.owner = BudgetOwner()
        self.producers: list[str] = []
        self.loses_next_answer = False
        """The stream dies after what was asked for has been done."""
        self.may_answer = asyncio.Event()
        """Cleared: what is asked for is done, and answered later."""
        self.may_answer.set()
        self._limit = limit
        self._server: grpc.aio.Server | None = None
        self.address = ""

    async def start(self) -> None:
        self._server = grpc.aio.server()
        control_service_pb2_grpc.add_ControlServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self.address = f"127.0.0.1:{port}"

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)

    def budget(self, account: str, unit: int, period: str) -> SimulatedBudget:
        name = LeaseName(account, _KINDS[unit], period)
        budget = self.owner.budgets.get(name)
        if budget is None:
            budget = self.owner.budgets[name] = SimulatedBudget(self._limit)
        return budget

    async def LeaseBudgets(
        self, request_iterator: AsyncIterator[LeaseBudgetsRequest], context: Any
    ) -> AsyncIterator[LeaseBudgetsResponse]:
        producer = ""
        async for request in request_iterator:
            producer = request.producer or producer
            if request.producer:
                self.producers.append(producer)
            grants = []
            for change in request.changes:
                name = change.budget
                budget = self.budget(name.account, name.unit, name.period)
                want = LeaseWant(
                    LeaseName(name.account, _KINDS[name.unit], name.period),
                    self._limit,
                    change.wanted,
                    change.returned,
                    number=change.number,
                )
                grant = budget.lease(producer, want)
                grants.append(
                    BudgetGrant(budget=name, granted=grant.granted, remaining=grant.remaining, limit=grant.limit)
                )
            if self.loses_next_answer:
                self.loses_next_answer = False
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the service is restarted")
            await self.may_answer.wait()
            yield LeaseBudgetsResponse(grants=grants)
