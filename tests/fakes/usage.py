"""Usage records, and databases that hold them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import sqlalchemy as sa

from control.database.schema import keys, organisations, projects
from control.database.usage_tables import budget_spending, usage_daily
from kvloom_common.database.database import Database
from kvloom_common.tenancy.usage_record import UsageRecord
from tests.fakes.migrated_database import control_database

NOON = 1_764_072_000.0
"""2025-11-25, 12:00 UTC."""


def usage_record(number: int, request_id: str, producer: str = "r0/1", **changes: object) -> UsageRecord:
    fields: dict[str, object] = {
        "producer": producer,
        "number": number,
        "request_id": request_id,
        "tenant": "acme/search",
        "key_id": "k1",
        "ended_at": NOON,
        "model": "m",
        "num_prompt_tokens": 10,
        "num_output_tokens": 5,
        "cost_nanos": 25,
        "duration_seconds": 1.0,
    }
    return UsageRecord(**(fields | changes))


@contextlib.asynccontextmanager
async def usage_database(url: str, **limits: object) -> AsyncIterator[Database]:
    """With the organisation acme, its project acme/search that has these limits, and its key k1."""
    async with control_database(url) as database:
        async with database.writing() as connection:
            common = {"tier": None, "created_at": 0.0}
            await connection.execute(organisations.insert(), {"id": "acme", "limits": {}, "disabled": False, **common})
            await connection.execute(
                projects.insert(),
                {
                    "id": "acme/search",
                    "organisation": "acme",
                    "limits": limits,
                    "cache_scope": "",
                    "models": [],
                    "disabled": False,
                    **common,
                },
            )
            key = {"id": "k1", "digest": b"1", "prefix": "kv-1", "project": "acme/search", "name": "", "user": None}
            await connection.execute(keys.insert(), {**key, "scopes": [], "models": [], "limits": {}, **common})
        yield database


async def totals(database: Database) -> dict[str, int]:
    """Over all days, tenants and models."""
    columns = ("num_requests", "num_prompt_tokens", "num_output_tokens", "cost_nanos")
    async with database.reading() as connection:
        sums = [sa.func.coalesce(sa.func.sum(usage_daily.c[name]), 0) for name in columns]
        row = (await connection.execute(sa.select(*sums))).one()
    return {name: int(value) for name, value in zip(columns, row, strict=True)}


async def spending(database: Database) -> dict[tuple[str, int, str], int]:
    async with database.reading() as connection:
        rows = await connection.execute(sa.select(budget_spending))
        return {(row.account, row.unit, row.period): row.spent for row in rows}
