"""The RPCs about usage and budgets, as edges, routers and commands call them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from control.usage.ledger import store
from kvloom.v1.control_service_pb2 import (
    BUDGET_UNIT_NANOS,
    BudgetChange,
    BudgetName,
    LeaseBudgetsRequest,
)
from kvloom.v1.usage_service_pb2 import (
    USAGE_GROUP_DAY,
    USAGE_GROUP_KEY,
    GetUsageRequest,
    ListAnswersRequest,
)
from kvloom_common.tenancy.usage_stream import UsageEntry
from tests.fakes.control_world import ControlWorld, control_world
from tests.fakes.usage import NOON, usage_record

BUDGET = BudgetName(account="tenant:acme/search", unit=BUDGET_UNIT_NANOS, period="2025-11")


@pytest.fixture
async def world(database_url: str) -> AsyncIterator[ControlWorld]:
    async with control_world(database_url) as world:
        yield world


async def test_a_stream_of_leases_answers_every_request_in_order(world: ControlWorld) -> None:
    """A router keeps one stream, and tells the answers apart by their order."""
    project = {"id": "acme/search", "limits": {"monthly_budget_nanos": 100}}
    await world.ask("CreateProject", project=project, create_organisation=True)
    call = world.control.LeaseBudgets()
    await call.write(LeaseBudgetsRequest(producer="r0/1", changes=[BudgetChange(budget=BUDGET, wanted=70, number=1)]))
    await call.write(LeaseBudgetsRequest(changes=[BudgetChange(budget=BUDGET, wanted=70, number=2)]))
    await call.write(LeaseBudgetsRequest(changes=[BudgetChange(budget=BUDGET, returned=50, number=3)]))
    answers = [await call.read() for _ in range(3)]
    assert [(one.grants[0].granted, one.grants[0].remaining) for one in answers] == [(70, 30), (30, 0), (0, 50)]
    await call.done_writing()
    assert await call.code() is grpc.StatusCode.OK


async def test_a_stream_without_a_name_is_refused(world: ControlWorld) -> None:
    """Nobody could settle its leases."""
    call = world.control.LeaseBudgets()
    await call.write(LeaseBudgetsRequest(changes=[BudgetChange(budget=BUDGET, wanted=1, number=1)]))
    with pytest.raises(grpc.aio.AioRpcError, match="must name the producer"):
        await call.read()


async def test_a_change_without_a_number_is_refused(world: ControlWorld) -> None:
    """It could not be told from one that is repeated, and would be done twice."""
    call = world.control.LeaseBudgets()
    await call.write(LeaseBudgetsRequest(producer="r0/1", changes=[BudgetChange(budget=BUDGET, wanted=1)]))
    with pytest.raises(grpc.aio.AioRpcError, match="must have a number"):
        await call.read()


async def test_usage_is_grouped_as_asked_for(world: ControlWorld) -> None:
    """A bill needs the sums of a month, and its reader those of a day and a key."""
    records = [
        usage_record(1, "a"),
        usage_record(2, "b", key_id="k2"),
        usage_record(3, "c", ended_at=NOON + 86_400),
        usage_record(4, "d", tenant="other/x"),
    ]
    await store(world.database, [UsageEntry("r0/1", tuple(records))])
    found = await world.usage.GetUsage(GetUsageRequest(tenant="acme/search", group_by=[USAGE_GROUP_DAY]))
    assert [(row.day, row.num_requests, row.cost_nanos) for row in found.rows] == [
        ("2025-11-25", 2, 50), ("2025-11-26", 1, 25),
    ]  # fmt: skip
    asked = GetUsageRequest(organisation="acme", group_by=[USAGE_GROUP_KEY], last_day="2025-11-25", max_rows=1)
    found = await world.usage.GetUsage(asked)
    assert [(row.key_id, row.num_output_tokens) for row in found.rows] == [("k1", 5)]
    assert found.is_truncated
    assert (await world.usage.GetUsage(GetUsageRequest())).rows[0].num_requests == 4


async def test_every_answer_is_listed_once(world: ControlWorld) -> None:
    """The comparison with witnesses reads them in parts."""
    records = [usage_record(number, f"r{number // 2}", num_output_tokens=number) for number in range(1, 1300)]
    await store(world.database, [UsageEntry("r0/1", tuple(records))])
    listed = [
        answer.request_id
        async for part in world.usage.ListAnswers(ListAnswersRequest(ended_after=NOON - 1))
        for answer in part.answers
    ]
    assert len(listed) == len(set(listed)) == 650
