"""The rows of a batch and of its lines. Each function is one transaction; a repetition changes nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from kvloom_common.database.database import Database
from orchestrator.batches.lines import Line
from orchestrator.database.schema import batch_lines, jobs
from orchestrator.seal import seal_of
from orchestrator.store import objects
from orchestrator.store.objects import StoredObject
from orchestrator.webhooks import outbox

KIND: Final = "batch"
OPEN: Final = "open"
COMPLETED: Final = "completed"
FAILED: Final = "failed"
FOREVER: Final = 0.0
"""A batch does not expire for those who work at it."""
_INSERTED: Final = 1000


class OpenLine(NamedTuple):
    line: int
    custom_id: str
    offset: int
    num_bytes: int
    turn: int = 0
    """Lines are answered in the order of their turns, and then of the file."""


BEFORE_FIRST: Final = OpenLine(0, "", 0, 0, -1)


async def read(database: Database, tenant: str, batch_id: str) -> StoredObject:
    """Raises KvloomError (NOT_FOUND)."""
    async with database.reading() as connection:
        return await objects.get(connection, tenant, KIND, batch_id, FOREVER)


async def update(
    database: Database, tenant: str, batch_id: str, change: Callable[[dict[str, Any]], Mapping[str, Any] | None]
) -> dict[str, Any]:
    """`change` returns what changes of a batch's body; None: nothing. Returns the body as it is then."""
    async with database.writing() as connection:
        return await update_within(connection, tenant, batch_id, change)


async def update_within(
    connection: AsyncConnection,
    tenant: str,
    batch_id: str,
    change: Callable[[dict[str, Any]], Mapping[str, Any] | None],
) -> dict[str, Any]:
    """Does what `update` does, as a part of a transaction."""
    one = await objects.get(connection, tenant, KIND, batch_id, FOREVER, for_update=True)
    changes = change(one.body)
    if changes is None:
        return one.body
    body = {**one.body, **changes}
    await objects.change(connection, tenant, batch_id, body)
    return body


async def begin(database: Database, tenant: str, batch_id: str, lines: Sequence[Line], now: float) -> dict[str, Any]:
    """The lines of a batch that is valid, in the order in which they are answered. It is in progress from now on,
    unless it was cancelled meanwhile."""
    async with database.writing() as connection:
        await connection.execute(batch_lines.delete().where(batch_lines.c.batch == batch_id))
        for first in range(0, len(lines), _INSERTED):
            rows = [
                {
                    "batch": batch_id,
                    "line": line.number,
                    "turn": turn,
                    "custom_id": line.custom_id,
                    "offset": line.offset,
                    "num_bytes": line.num_bytes,
                    "state": OPEN,
                }
                for turn, line in enumerate(lines[first : first + _INSERTED], first + 1)
            ]
            await connection.execute(batch_lines.insert(), rows)
        return await update_within(
            *(connection, tenant, batch_id),
            lambda body: (
                {"status": "in_progress", "in_progress_at": int(now)} if body["status"] == "validating" else None
            ),
        )


async def open_lines(database: Database, batch_id: str, after: OpenLine, most: int) -> list[OpenLine]:
    """The lines to answer next after that one."""
    order, there = (
        sa.tuple_(batch_lines.c.turn, batch_lines.c.line),
        sa.tuple_(*map(sa.literal, (after.turn, after.line))),
    )
    async with database.reading() as connection:
        is_open = sa.and_(batch_lines.c.batch == batch_id, batch_lines.c.state == OPEN, order > there)
        columns = [batch_lines.c[name] for name in OpenLine._fields]
        rows = await connection.execute(
            sa.select(*columns).where(is_open).order_by(batch_lines.c.turn, batch_lines.c.line).limit(most)
        )
        return [OpenLine._make(row) for row in rows]


async def end_line(database: Database, tenant: str, batch_id: str, line: int, state: str, result: bytes) -> bool:
    """Returns False if the line has ended before."""
    async with database.writing() as connection:
        own = sa.and_(batch_lines.c.batch == batch_id, batch_lines.c.line == line, batch_lines.c.state == OPEN)
        sealed = seal_of(connection).sealed(tenant, result)
        done = await connection.execute(batch_lines.update().where(own).values(state=state, result=sealed))
        return done.rowcount == 1


async def counts(connection: AsyncConnection, batch_id: str) -> dict[str, int]:
    wanted = sa.select(batch_lines.c.state, sa.func.count()).where(batch_lines.c.batch == batch_id)
    found = {row[0]: row[1] for row in await connection.execute(wanted.group_by(batch_lines.c.state))}
    return {
        "total": sum(found.values()),
        "completed": found.get(COMPLETED, 0),
        "failed": found.get(FAILED, 0),
    }


async def results(database: Database, tenant: str, batch_id: str, state: str) -> AsyncIterator[bytes]:
    """The results of the lines that have ended so, in the order of the lines."""
    last = 0
    while True:
        async with database.reading() as connection:
            wanted = sa.select(batch_lines.c.line, batch_lines.c.result).where(
                batch_lines.c.batch == batch_id, batch_lines.c.state == state, batch_lines.c.line > last
            )
            rows = (await connection.execute(wanted.order_by(batch_lines.c.line).limit(200))).all()
            seal = seal_of(connection)
        for row in rows:
            yield seal.opened(tenant, row.result)
        if not rows:
            return
        last = rows[-1].line


async def finish(
    database: Database,
    tenant: str,
    batch_id: str,
    files: Sequence[StoredObject],
    change: Callable[[dict[str, Any]], Mapping[str, Any] | None],
    now: float,
) -> None:
    """Ends a batch, with its files, the webhooks that tell of it, and its job."""
    async with database.writing() as connection:
        for file in files:
            await objects.add(connection, tenant, "file", file)
        number = await counts(connection, batch_id)
        body = await update_within(
            connection, tenant, batch_id, lambda body: {**(change(body) or {}), "request_counts": number}
        )
        await outbox.announce(connection, tenant, f"batch.{body['status']}", batch_id, now)
        await connection.execute(batch_lines.delete().where(batch_lines.c.batch == batch_id))
        await connection.execute(jobs.delete().where(jobs.c.id == batch_id))
