"""The keys of copies of conversations (hot_items.py) as rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from kvloom_common.database.database import Database
from orchestrator.database.schema import hot_keys as table
from orchestrator.database.schema import items, objects
from orchestrator.store.objects import owned

CONVERSATION = "conversation"


async def rows_from(
    connection: AsyncConnection, tenant: str, conversation: str, now: float, position: int
) -> Sequence[Any]:
    """The key of a conversation, beside each of its items from a position on, in order: (key, position, body). A row
    without an item if there is none; no row for a conversation that is unknown, another tenant's, or deleted."""
    of_key = sa.outerjoin(objects, table, table.c.conversation == objects.c.id)
    of_items = of_key.outerjoin(items, sa.and_(items.c.parent == objects.c.id, items.c.position >= position))
    wanted = sa.select(table.c.key, items.c.position, items.c.body).select_from(of_items)
    wanted = wanted.where(objects.c.id == conversation, owned(tenant, CONVERSATION, now)).order_by(items.c.position)
    return (await connection.execute(wanted)).all()


async def give(database: Database, conversation: str, key: bytes) -> None:
    """Gives a conversation its key, unless it has one or is gone. Its row is locked: who deletes an item, or the
    conversation, does so before or afterwards."""
    async with database.writing() as connection:
        there = sa.select(objects.c.id).where(objects.c.id == conversation).with_for_update()
        known = sa.select(table.c.conversation).where(table.c.conversation == conversation)
        if await connection.scalar(there) is not None and await connection.scalar(known) is None:
            await connection.execute(table.insert().values(conversation=conversation, key=key))


async def drop(connection: AsyncConnection, conversation: str) -> None:
    """Nobody reads its copies any more: an item was deleted."""
    await connection.execute(table.delete().where(table.c.conversation == conversation))
