"""Hands out hard budgets to routers: what was spent and what is leased are never more than the budget."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from control.database.usage_tables import budget_leases, usage_producers
from control.usage.account_limits import hard_limits
from control.usage.accounts import Budget
from control.usage.ledger import lock_usage, put, spent_of
from kvloom.v1.control_service_pb2 import BudgetChange, BudgetGrant, BudgetName
from kvloom_common.database.database import Database


class ProducerClosedError(Exception):
    """The router was declared dead: another process has reported all of its records."""


async def change_leases(database: Database, producer: str, changes: Sequence[BudgetChange]) -> list[BudgetGrant]:
    """Take back what a router returns and grant what it wants, as far as there is any, in one transaction. A change
    that is repeated is answered as before. Raises ProducerClosedError."""
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
    last = await _last_change(connection, producer, budget)
    # Less than nothing where the limit has been lowered.
    left = limit - await spent_of(connection, budget) - await leased_of(connection, budget)
    if last is not None and change.number <= last.number:
        # Asked for again, since the answer was lost; or by a connection that has been given up meanwhile.
        granted = last.granted if change.number == last.number else 0
        return BudgetGrant(budget=change.budget, granted=granted, remaining=max(0, left), limit=limit)
    leased = 0 if last is None else last.leased
    returned = min(change.returned, leased)
    left = max(0, left + returned)
    granted = min(change.wanted, left) if limit else change.wanted
    row = {
        **budget._asdict(),
        "producer": producer,
        "leased": leased - returned + (granted if limit else 0),
        "number": change.number,
        "granted": granted,
    }
    if last is None:
        await _forget_earlier(connection, producer, budget)
    await put(database, connection, budget_leases, row)
    return BudgetGrant(budget=change.budget, granted=granted, remaining=max(0, left - granted), limit=limit)


async def _last_change(connection: AsyncConnection, producer: str, budget: Budget) -> sa.Row | None:
    """The router's lease, with the number and the grant of its last change; None: it has none."""
    leases = budget_leases.c
    query = sa.select(leases.leased, leases.number, leases.granted).where(
        *_lease_of(producer, budget), leases.period == budget.period
    )
    return (await connection.execute(query)).one_or_none()


async def _forget_earlier(connection: AsyncConnection, producer: str, budget: Budget) -> None:
    """A lease of a period begins: those of periods of which nothing is leased any more are forgotten."""
    leases = budget_leases.c
    is_over = sa.and_(leases.period < budget.period, leases.leased == 0)
    await connection.execute(sa.delete(budget_leases).where(*_lease_of(producer, budget), is_over))


def _lease_of(producer: str, budget: Budget) -> tuple[sa.ColumnElement[bool], ...]:
    """In any period."""
    leases = budget_leases.c
    return leases.producer == producer, leases.account == budget.account, leases.unit == budget.unit


async def leased_of(connection: AsyncConnection, budget: Budget) -> int:
    """Returns what all routers may still spend, or have spent without its being known."""
    leases = budget_leases.c
    found = await connection.scalar(
        sa.select(sa.func.coalesce(sa.func.sum(leases.leased), 0)).where(
            leases.account == budget.account, leases.unit == budget.unit, leases.period == budget.period
        )
    )
    return int(found or 0)


def budget_name(budget: Budget) -> BudgetName:
    return BudgetName(account=budget.account, unit=budget.unit, period=budget.period)  # pyrefly: ignore[bad-argument-type]
