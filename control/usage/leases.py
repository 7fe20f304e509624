"""Hands out hard budgets to routers: what was spent and what is leased are never more than the budget."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from control.database.database import Database
from control.database.usage_tables import budget_leases, usage_producers
from control.usage.account_limits import hard_limits
from control.usage.accounts import Budget
from control.usage.alerts import spent_of
from control.usage.ledger import lock_usage, release_lease, upsert
from kvloom.v1.control_service_pb2 import BudgetChange, BudgetGrant, BudgetName


class ProducerClosedError(Exception):
    """The router was declared dead: another process has reported all of its records."""


async def change_leases(database: Database, producer: str, changes: Sequence[BudgetChange]) -> list[BudgetGrant]:
    """Take back what a router returns and grant what it wants, as far as there is any, in one transaction. Raises
    ProducerClosedError."""
    budgets = [Budget(one.budget.account, one.budget.unit, one.budget.period) for one in changes]
    async with database.writing() as connection:
        await lock_usage(database, connection)
        closed = sa.select(usage_producers.c.is_closed).where(usage_producers.c.producer == producer)
        if await connection.scalar(closed):
            raise ProducerClosedError(producer)
        limits = await hard_limits(connection, budgets, with_shadow=True)
        return [
            await _change(database, connection, producer, budget, change, limits.get(budget, 0))
            for budget, change in zip(budgets, changes, strict=True)
        ]


async def _change(
    database: Database,
    connection: AsyncConnection,
    producer: str,
    budget: Budget,
    change: BudgetChange,
    limit: int,
) -> BudgetGrant:
    if change.returned:
        await release_lease(connection, budget, producer, change.returned)
    if not limit:
        return BudgetGrant(budget=change.budget, granted=change.wanted, remaining=0, limit=0)
    left = max(0, limit - await spent_of(connection, budget) - await leased_of(connection, budget))
    granted = min(change.wanted, left)
    if granted:
        statement = upsert(database, budget_leases)
        added = budget_leases.c.leased + statement.excluded.leased
        await connection.execute(
            statement.on_conflict_do_update(index_elements=list(budget_leases.primary_key), set_={"leased": added}),
            {**budget._asdict(), "producer": producer, "leased": granted},
        )
    return BudgetGrant(budget=change.budget, granted=granted, remaining=left - granted, limit=limit)


async def leased_of(connection: AsyncConnection, budget: Budget) -> int:
    """What all routers may still spend, or have spent without that it is known."""
    leases = budget_leases.c
    found = await connection.scalar(
        sa.select(sa.func.coalesce(sa.func.sum(leases.leased), 0)).where(
            leases.account == budget.account, leases.unit == budget.unit, leases.period == budget.period
        )
    )
    return int(found or 0)


def budget_name(budget: Budget) -> BudgetName:
    return BudgetName(account=budget.account, unit=budget.unit, period=budget.period)  # pyright: ignore[reportArgumentType]
