"""Usage by day, model, key and tenant; budgets; and what was metered of each answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Final

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from control.database.database import Database
from control.database.usage_tables import usage_daily, usage_records
from control.usage.account_limits import hard_limits
from control.usage.accounts import SUMS, Budget, accounts_of, day_of
from control.usage.alerts import spent_of
from control.usage.leases import budget_name, leased_of
from kvloom.tenancy.usage_record import UsageRecord, merged
from kvloom.v1 import usage_service_pb2 as pb
from kvloom.v1.control_service_pb2 import BUDGET_UNIT_NANOS, BUDGET_UNIT_TOKENS

MAX_ROWS: Final = 10_000
MAX_LISTED: Final = 500
"""Answers in one message, and records that are read at a time."""
_GROUPS: Final = {
    pb.USAGE_GROUP_DAY: "day",
    pb.USAGE_GROUP_MODEL: "model",
    pb.USAGE_GROUP_KEY: "key_id",
    pb.USAGE_GROUP_TENANT: "tenant",
    pb.USAGE_GROUP_TIER: "tier",
}


async def usage_of(database: Database, request: pb.GetUsageRequest) -> pb.GetUsageResponse:
    """Raises ValueError for a group that this version does not know."""
    daily = usage_daily.c
    try:
        groups = [daily[_GROUPS[group]] for group in dict.fromkeys(request.group_by)]
    except KeyError as error:
        raise ValueError(f"group_by has no value {error}.") from None
    max_rows = min(request.max_rows or MAX_ROWS, MAX_ROWS)
    # The sums of integers are numbers without a fixed size on PostgreSQL.
    sums = [sa.cast(sa.func.coalesce(sa.func.sum(daily[name]), 0), sa.BigInteger).label(name) for name in SUMS]
    query = sa.select(*groups, *sums).group_by(*groups).order_by(*groups).limit(max_rows + 1)
    if request.tenant:
        query = query.where(daily.tenant == request.tenant)
    if request.organisation:
        query = query.where(daily.tenant.startswith(f"{request.organisation}/", autoescape=True))
    if request.first_day:
        query = query.where(daily.day >= request.first_day)
    if request.last_day:
        query = query.where(daily.day <= request.last_day)
    async with database.reading() as connection:
        rows = (await connection.execute(query)).mappings().all()
    response = pb.GetUsageResponse(is_truncated=len(rows) > max_rows)
    for row in rows[:max_rows]:
        fields = dict(row)
        block_seconds = fields.pop("block_milliseconds") / 1e3
        response.rows.add(block_seconds=block_seconds, **fields)
    return response


async def budgets_of(database: Database, tenant: str, key_id: str, now: float) -> list[pb.BudgetState]:
    """Those in force at `now` (seconds since 1970)."""
    day = day_of(now)
    names = accounts_of(tenant, key_id)
    budgets = [Budget(name, BUDGET_UNIT_NANOS, day[:7]) for name in names]
    budgets += [Budget(name, BUDGET_UNIT_TOKENS, day) for name in names]
    async with database.reading() as connection:
        limits = await hard_limits(connection, budgets)
        return [await _state(connection, budget, limits[budget]) for budget in budgets if budget in limits]


async def _state(connection: AsyncConnection, budget: Budget, limit: int) -> pb.BudgetState:
    spent, leased = await spent_of(connection, budget), await leased_of(connection, budget)
    return pb.BudgetState(budget=budget_name(budget), limit=limit, spent=spent, leased=leased)


async def answers_of(database: Database, request: pb.ListAnswersRequest) -> AsyncIterator[list[pb.MeteredAnswer]]:
    """In parts. All records of an answer count, also those outside the time that is asked for."""
    records = usage_records.c
    after = ("", "")
    while True:
        keys = (
            sa.select(records.request_id, records.answer_id)
            .where(sa.tuple_(records.request_id, records.answer_id) > sa.tuple_(*map(sa.literal, after)))
            .where(records.request_id != "")
            .group_by(records.request_id, records.answer_id)
            .order_by(records.request_id, records.answer_id)
            .limit(MAX_LISTED)
        )
        if request.ended_after:
            keys = keys.where(records.ended_at >= request.ended_after)
        if request.ended_before:
            keys = keys.where(records.ended_at < request.ended_before)
        async with database.reading() as connection:
            found = [(row.request_id, row.answer_id) for row in await connection.execute(keys)]
            if not found:
                return
            of_these = sa.select(records.record).where(records.request_id.in_({name for name, _ in found}))
            encoded = list(await connection.scalars(of_these))
        after = found[-1]
        yield _merged(found, encoded, request.tenant)


def _merged(answers: Sequence[tuple[str, str]], encoded: Sequence[bytes], tenant: str) -> list[pb.MeteredAnswer]:
    by_answer: dict[tuple[str, str], list[UsageRecord]] = {}
    for one in encoded:
        record = msgspec.json.decode(one, type=UsageRecord)
        by_answer.setdefault(record.answer, []).append(record)
    found = []
    for answer in answers:
        records = by_answer[answer]
        record = merged(records)
        if not tenant or record.tenant == tenant:
            found.append(
                pb.MeteredAnswer(
                    request_id=record.request_id,
                    tenant=record.tenant,
                    model=record.priced_model,
                    outcome=record.outcome,
                    num_prompt_tokens=record.num_prompt_tokens,
                    num_output_tokens=record.num_output_tokens,
                    cost_nanos=record.cost_nanos,
                    num_records=len(records),
                )
            )
    return found
