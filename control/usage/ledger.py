"""Brings usage records into the database, each once, whatever the order in which they come and however often.

One transaction stores a batch and changes all sums by what it adds. Sums count the records of each answer that
count now, so a record that takes another one's place takes that one's share out again.

Notices when an account has used a certain part of its budget. Each threshold is noted once a period, in the
transaction that has reached it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from control.database.usage_tables import (
    budget_alerts,
    budget_leases,
    budget_spending,
    usage_daily,
    usage_producers,
    usage_records,
)
from control.usage.account_limits import hard_limits, key_accounts
from control.usage.accounts import SUMS, Budget, Deltas
from kvloom_common.database.database import Database
from kvloom_common.tenancy.usage_record import UsageRecord, counting
from kvloom_common.tenancy.usage_stream import Stored, UsageEntry


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


_LOCK: Final = 0x7573616765  # "usage"
MAX_PARAMETERS: Final = 500
"""How many values one query names."""

Answer = tuple[str, str]


async def lock_usage(database: Database, connection: AsyncConnection) -> None:
    """Until the transaction ends, no other one changes what was spent or leased. SQLite has one writer anyway."""
    if not database.is_sqlite:
        await connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))


async def store(
    database: Database, entries: Sequence[UsageEntry], alert_percents: Sequence[int] = (), now: float = 0.0
) -> dict[str, Stored]:
    """Returns what the database now has of the producers of these entries. `alert_percents`: the thresholds of budgets
    that are to be noted when they are reached. Raises what the database raises; nothing is stored then."""
    records = {(record.producer, record.number): record for entry in entries for record in entry.records}
    async with database.writing() as connection:
        await lock_usage(database, connection)
        new = await _insert_new(connection, records)
        deltas = await _deltas(connection, new)
        await _apply(database, connection, deltas)
        stored = await _advance(database, connection, entries)
        if alert_percents:
            risen = [budget for budget, amount in deltas.spending.items() if amount > 0]
            await note_thresholds(database, connection, risen, alert_percents, now)
    return stored


async def _insert_new(connection: AsyncConnection, records: dict[tuple[str, int], UsageRecord]) -> list[UsageRecord]:
    """Insert those that the database does not have, and return them."""
    known: set[tuple[str, int]] = set()
    by_producer: dict[str, list[int]] = {}
    for producer, number in records:
        by_producer.setdefault(producer, []).append(number)
    for producer, numbers in by_producer.items():
        stored_number = (await _producer(connection, producer)).number
        known |= {(producer, number) for number in numbers if number <= stored_number}  # deleted ones, too
        known |= {
            (producer, number)
            for number in await connection.scalars(
                sa.select(usage_records.c.number).where(
                    usage_records.c.producer == producer, usage_records.c.number.between(min(numbers), max(numbers))
                )
            )
        }
    new = [record for key, record in records.items() if key not in known]
    if new:
        await connection.execute(
            usage_records.insert(),
            [
                {
                    "producer": record.producer,
                    "number": record.number,
                    "request_id": record.request_id,
                    "answer_id": record.answer_id,
                    "ended_at": record.ended_at,
                    "record": msgspec.json.encode(record),
                }
                for record in new
            ],
        )
    return new


async def _deltas(connection: AsyncConnection, records: Iterable[UsageRecord]) -> Deltas:
    arrived = list(records)
    added: dict[Answer, list[UsageRecord]] = {}
    for record in arrived:
        if record.request_id:  # otherwise only the number is known
            added.setdefault(record.answer, []).append(record)
    all_records = await _records_of(connection, added)
    key_ids = {record.key_id for records in all_records.values() for record in records}
    deltas = Deltas(await key_accounts(connection, key_ids))
    for record in arrived:
        deltas.settle(record)
    for answer, of_answer in added.items():
        numbers = {(record.producer, record.number) for record in of_answer}
        whole = all_records[answer]
        earlier = [record for record in whole if (record.producer, record.number) not in numbers]
        old, new = counting(earlier), counting(whole)
        if new != old:
            deltas.replace(old, new)
    return deltas


async def _records_of(connection: AsyncConnection, answers: Iterable[Answer]) -> dict[Answer, list[UsageRecord]]:
    """All that the database has of these answers."""
    request_ids = sorted({request_id for request_id, _ in answers})
    found: dict[Answer, list[UsageRecord]] = {}
    for at in range(0, len(request_ids), MAX_PARAMETERS):
        query = sa.select(usage_records.c.record).where(
            usage_records.c.request_id.in_(request_ids[at : at + MAX_PARAMETERS])
        )
        for encoded in await connection.scalars(query):
            record = msgspec.json.decode(encoded, type=UsageRecord)
            found.setdefault(record.answer, []).append(record)
    return found


async def _apply(database: Database, connection: AsyncConnection, deltas: Deltas) -> None:
    days = [
        {**key._asdict(), **dict(zip(SUMS, sums, strict=True))}
        for key, sums in sorted(deltas.days.items())
        if any(sums)
    ]
    await _add(database, connection, usage_daily, days, SUMS)
    spending = [{**budget._asdict(), "spent": amount} for budget, amount in sorted(deltas.spending.items()) if amount]
    await _add(database, connection, budget_spending, spending, ("spent",))
    for (budget, producer), amount in sorted(deltas.settled.items()):
        await release_lease(connection, budget, producer, amount)


async def release_lease(connection: AsyncConnection, budget: Budget, producer: str, amount: int) -> None:
    """A producer's lease is less by so much, and never negative."""
    leases = budget_leases.c
    here = sa.and_(
        leases.account == budget.account,
        leases.unit == budget.unit,
        leases.period == budget.period,
        leases.producer == producer,
    )
    left = sa.case((leases.leased > amount, leases.leased - amount), else_=0)
    await connection.execute(sa.update(budget_leases).where(here).values(leased=left))


async def _advance(database: Database, connection: AsyncConnection, entries: Sequence[UsageEntry]) -> dict[str, Stored]:
    """Move the watermarks of the producers, and close those that have ended."""
    closed_after = {entry.producer: entry.closed_after for entry in entries if entry.closed_after is not None}
    found: dict[str, Stored] = {}
    for producer in sorted({entry.producer for entry in entries}):
        earlier = await _producer(connection, producer)
        number, is_closed = earlier.number, earlier.is_closed
        numbers = await connection.scalars(
            sa.select(usage_records.c.number)
            .where(usage_records.c.producer == producer, usage_records.c.number > number)
            .order_by(usage_records.c.number)
        )
        for following in numbers:
            if following != number + 1:
                break
            number = following
        if not is_closed and producer in closed_after and number >= closed_after[producer]:
            is_closed = True
            await connection.execute(sa.delete(budget_leases).where(budget_leases.c.producer == producer))
        found[producer] = Stored(number, is_closed)
        await put(
            database,
            connection,
            usage_producers,
            {"producer": producer, "stored_number": number, "is_closed": is_closed},
        )
    return found


async def _producer(connection: AsyncConnection, producer: str) -> Stored:
    query = sa.select(usage_producers).where(usage_producers.c.producer == producer)
    row = (await connection.execute(query)).one_or_none()
    return Stored() if row is None else Stored(row.stored_number, row.is_closed)


def upsert(database: Database, table: sa.Table) -> Any:
    """An INSERT of the database's dialect, with `on_conflict_do_...`."""
    return sqlite.insert(table) if database.is_sqlite else postgresql.insert(table)


async def _add(
    database: Database,
    connection: AsyncConnection,
    table: sa.Table,
    rows: Sequence[dict[str, Any]],
    columns: Sequence[str],
) -> None:
    """Add to these columns, of rows that may not exist yet."""
    if not rows:
        return
    statement = upsert(database, table)
    changed = {column: table.c[column] + statement.excluded[column] for column in columns}
    await connection.execute(
        statement.on_conflict_do_update(index_elements=list(table.primary_key), set_=changed), rows
    )


async def put(database: Database, connection: AsyncConnection, table: sa.Table, row: dict[str, Any]) -> None:
    """Insert a row, or replace the one of its primary key."""
    statement = upsert(database, table)
    key = list(table.primary_key)
    changed = {column.name: statement.excluded[column.name] for column in table.columns if not column.primary_key}
    await connection.execute(statement.on_conflict_do_update(index_elements=key, set_=changed), row)


async def forget_records(database: Database, before: float) -> int:
    """Delete records that ended before that time (seconds since 1970). The sums stay. Returns how many."""
    async with database.writing() as connection:
        await lock_usage(database, connection)
        done = await connection.execute(sa.delete(usage_records).where(usage_records.c.ended_at < before))
        return done.rowcount
