"""The hard budgets of accounts, from the directory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from control.database.schema import keys, limit_tiers, organisations, projects
from control.directory import account_limits
from control.usage.accounts import Budget
from kvloom.v1.control_service_pb2 import BUDGET_UNIT_NANOS

_TABLES = {"key": keys, "tenant": projects, "org": organisations}
_ITS_TIER = "its tier"
MAX_IDS = 500
"""How many ids one query names."""


async def hard_limits(
    connection: AsyncConnection, budgets: Iterable[Budget], *, with_shadow: bool = False
) -> dict[Budget, int]:
    """Those of them that have a limit; `with_shadow`: also if the account's limits only count what they would
    refuse."""
    wanted = set(budgets)
    limits = await _limits_of(connection, {budget.account for budget in wanted})
    found = {}
    for budget in wanted:
        name = "monthly_budget_nanos" if budget.unit == BUDGET_UNIT_NANOS else "tokens_per_day"
        limit = limits.get(budget.account, {})
        if limit.get(name) and (with_shadow or not limit.get("shadow")):
            found[budget] = int(limit[name])
    return found


async def key_accounts(connection: AsyncConnection, key_ids: Iterable[str]) -> dict[str, str]:
    """Those of these keys that share the account of a key that they have replaced, with the id of that one."""
    found: dict[str, str] = {}
    ids = sorted(set(key_ids))
    for at in range(0, len(ids), MAX_IDS):
        some = sa.select(keys.c.id, keys.c.account).where(keys.c.id.in_(ids[at : at + MAX_IDS]), keys.c.account != "")
        found |= {row.id: row.account for row in await connection.execute(some)}
    return found


async def _limits_of(connection: AsyncConnection, accounts: set[str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for kind, table in _TABLES.items():
        ids = sorted(account.partition(":")[2] for account in accounts if account.startswith(f"{kind}:"))
        for at in range(0, len(ids), MAX_IDS):
            some = ids[at : at + MAX_IDS]
            operator_set = table.c.operator_set if table is not organisations else sa.null()
            columns = [table.c.limits, operator_set.label("operator_set"), limit_tiers.c.limits.label("tier_limits")]
            query = sa.select(table.c.id, *columns)
            if kind == "key":  # the last key of an account says what its limits are
                account = sa.case((keys.c.account == "", keys.c.id), else_=keys.c.account)
                query = sa.select(account.label("id"), *columns)
                query = query.where(sa.or_(keys.c.id.in_(some), keys.c.account.in_(some)))
                query = query.order_by(keys.c.revoked_at.is_(None), keys.c.created_at)
            else:
                query = query.where(table.c.id.in_(some))
            query = query.select_from(table.outerjoin(limit_tiers, table.c.tier == limit_tiers.c.name))
            for row in await connection.execute(query):
                tiers = {_ITS_TIER: row.tier_limits or {}}
                found[f"{kind}:{row.id}"] = account_limits.effective(_ITS_TIER, row.limits, tiers, row.operator_set)
    return found
