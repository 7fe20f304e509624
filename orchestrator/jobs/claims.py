"""Who does which job. Each function is one transaction."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import sqlalchemy as sa

from kvloom_common.database.database import Database
from orchestrator.database.schema import jobs


async def claim(
    database: Database, holder: str, kind: str, now: float, held_seconds: float, most: int, own: Collection[str]
) -> list[Any]:
    """The rows of jobs that `holder` holds from now on, besides those that it has (`own`). What it held under the same
    name before it was killed is its own at once."""
    is_free = sa.and_(jobs.c.kind == kind, sa.or_(jobs.c.held_until < now, jobs.c.holder == holder))
    wanted = sa.select(jobs).where(is_free, jobs.c.id.not_in(own)).order_by(jobs.c.created_at).limit(most)
    async with database.writing() as connection:
        rows = (await connection.execute(wanted.with_for_update(skip_locked=True))).all()
        if rows:
            values = {"holder": holder, "held_until": now + held_seconds}
            await connection.execute(jobs.update().where(jobs.c.id.in_([row.id for row in rows])).values(values))
    return list(rows)


async def hold_on(
    database: Database, holder: str, job_ids: Collection[str], now: float, held_seconds: float
) -> set[str]:
    """Returns those of the jobs that `holder` still has."""
    is_own = sa.and_(jobs.c.id.in_(job_ids), jobs.c.holder == holder)
    async with database.writing() as connection:
        await connection.execute(jobs.update().where(is_own).values(held_until=now + held_seconds))
        return set((await connection.scalars(sa.select(jobs.c.id).where(is_own))).all())
