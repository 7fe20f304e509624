"""Notices when an account has used a certain part of its budget. Each threshold is noted once a period, in the
transaction that has reached it."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from control.database.usage_tables import budget_alerts, budget_spending
from control.usage.account_limits import hard_limits
from control.usage.accounts import Budget
from kvloom_common.database.database import Database


async def spent_of(connection: AsyncConnection, budget: Budget) -> int:
    spending = budget_spending.c
    found = await connection.scalar(
        sa.select(spending.spent).where(
            spending.account == budget.account, spending.unit == budget.unit, spending.period == budget.period
        )
    )
    return found or 0


async def note_thresholds(
    database: Database, connection: AsyncConnection, budgets: Sequence[Budget], percents: Sequence[int], now: float
) -> None:
    """Notes which thresholds of these budgets are reached now."""
    rows = []
    for budget, limit in (await hard_limits(connection, budgets)).items():
        spent = await spent_of(connection, budget)
        rows += [
            {
                **budget._asdict(),
                "percent": percent,
                "id": uuid.uuid4().hex,
                "spent": spent,
                "limit": limit,
                "reached_at": now,
                "num_tries": 0,
                "sent_at": None,
            }
            for percent in percents
            if 100 * spent >= percent * limit
        ]
    if rows:
        insert = sqlite.insert if database.is_sqlite else postgresql.insert
        await connection.execute(insert(budget_alerts).on_conflict_do_nothing(), rows)
