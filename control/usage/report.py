"""Usage by day, model, key and tenant; budgets; and what was metered of each answer."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from typing import Final

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from control.database.usage_tables import usage_daily, usage_records
from control.usage.account_limits import hard_limits, key_accounts
from control.usage.accounts import SUMS, Budget, accounts_of, day_of
from control.usage.leases import budget_name, leased_of
from control.usage.ledger import spent_of
from kvloom.v1 import usage_service_pb2 as pb
from kvloom.v1.control_service_pb2 import BUDGET_UNIT_NANOS, BUDGET_UNIT_TOKENS
from kvloom_common.database.database import Database
from kvloom_common.tenancy.usage_record import UsageRecord, counting

MAX_ROWS: Final = 10_000
MAX_LISTED: Final = 500
"""Answers in one message, and records that are read at a time."""
_GROUPS: Final = {
    pb.USAGE_GROUP_DAY: "day",
    pb.USAGE_GROUP_MODEL: "model",
    pb.USAGE_GROUP_KEY: "key_id",
    pb.USAGE_GROUP_TENANT: "tenant",
    pb.USAGE_GROUP_TIER: "tier",
    pb.USAGE_GROUP_CLASS: "priority_class",
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
    query = query.where(sa.or_(*(daily[name] != 0 for name in SUMS)))  # what was discarded has left zeros
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
        fields = {str(name): value for name, value in row.items()}
        block_seconds = fields.pop("block_milliseconds") / 1e3
        response.rows.add(block_seconds=block_seconds, **fields)
    return response


async def budgets_of(database: Database, tenant: str, key_id: str, now: float) -> list[pb.BudgetState]:
    """Those in force at `now` (seconds since 1970)."""
    day = day_of(now)
    async with database.reading() as connection:
        names = accounts_of(tenant, (await key_accounts(connection, [key_id])).get(key_id, key_id))
        budgets = [Budget(name, BUDGET_UNIT_NANOS, day[:7]) for name in names]
        budgets += [Budget(name, BUDGET_UNIT_TOKENS, day) for name in names]
        limits = await hard_limits(connection, budgets)
        return [await _state(connection, budget, limits[budget]) for budget in budgets if budget in limits]


async def _state(connection: AsyncConnection, budget: Budget, limit: int) -> pb.BudgetState:
    spent, leased = await spent_of(connection, budget), await leased_of(connection, budget)
    return pb.BudgetState(budget=budget_name(budget), limit=limit, spent=spent, leased=leased)


async def answers_of(database: Database, request: pb.ListAnswersRequest) -> AsyncIterator[list[pb.MeteredAnswer]]:
    """In parts. All records of an answer count, also those outside the time that is asked for."""
    records = usage_records.c
    after = ""
    while True:
        in_time = sa.select(records.request_id).where(records.request_id > after, records.request_id != "")
        if request.ended_after:
            in_time = in_time.where(records.ended_at >= request.ended_after)
        if request.ended_before:
            in_time = in_time.where(records.ended_at < request.ended_before)
        in_time = in_time.distinct().order_by(records.request_id).limit(MAX_LISTED)
        names, encoded = await database.uninterrupted(_named(database, in_time))
        if not names:
            return
        after = names[-1]
        yield _answers(encoded, request)


async def _named(database: Database, query: sa.Select[str]) -> tuple[list[str], list[bytes]]:
    """The request ids that the query finds, and all of their records."""
    async with database.reading() as connection:
        names = list(await connection.scalars(query))
        of_these = sa.select(usage_records.c.record).where(usage_records.c.request_id.in_(names))
        return names, list(await connection.scalars(of_these)) if names else []


def _answers(encoded: Sequence[bytes], request: pb.ListAnswersRequest) -> list[pb.MeteredAnswer]:
    """Those with a record in the time that is asked for."""
    by_answer: dict[tuple[str, str], list[UsageRecord]] = {}
    for one in encoded:
        record = msgspec.json.decode(one, type=UsageRecord)
        by_answer.setdefault(record.answer, []).append(record)
    before = request.ended_before or math.inf
    return [
        _answer(records)
        for _, records in sorted(by_answer.items())
        if any(request.ended_after <= record.ended_at < before for record in records)
        and (not request.tenant or counting(records)[0].tenant == request.tenant)
    ]


def _answer(records: Sequence[UsageRecord]) -> pb.MeteredAnswer:
    counted = counting(records)
    found = max(counted, key=lambda record: record.ended_at)
    answer = pb.MeteredAnswer(
        request_id=found.request_id,
        answer_id=found.answer_id,
        tenant=found.tenant,
        model=found.priced_model,
        outcome=found.outcome,
        priority_class=found.served_class,
        error_reason=found.error_reason,
        num_records=len(records),
        num_prompt_tokens=sum(record.num_prompt_tokens for record in counted),
        num_output_tokens=sum(record.num_output_tokens for record in counted),
        num_reasoning_tokens=sum(record.num_reasoning_tokens for record in counted),
        cost_nanos=sum(record.cost_nanos for record in counted),
    )
    for record in records:
        if not record.corrects:  # it repeats what the corrected one says of its request
            answer.num_preemptions += record.num_preemptions
            answer.num_migrations += record.num_migrations
            answer.num_failovers += record.num_failovers
    return answer
