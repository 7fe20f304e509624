"""The keys of copies of conversations (hot_items.py) as rows."""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from kvloom_common.database.database import Database
from orchestrator.database.schema import hot_keys as table
from orchestrator.database.schema import objects


async def of(connection: AsyncConnection, conversations: Collection[str]) -> list[bytes]:
    """The keys of those that have one."""
    return list(await connection.scalars(sa.select(table.c.key).where(table.c.conversation.in_(conversations))))


async def give(database: Database, conversation: str, key: bytes) -> None:
    """Gives a conversation its key, unless it has one or is gone. Its row is locked: who deletes an item, or the
    conversation, does so before or afterwards."""
    async with database.writing() as connection:
        there = sa.select(objects.c.id).where(objects.c.id == conversation).with_for_update()
        if await connection.scalar(there) is not None and not await of(connection, [conversation]):
            await connection.execute(table.insert().values(conversation=conversation, key=key))


async def drop(connection: AsyncConnection, conversation: str) -> None:
    """Nobody reads its copies any more: an item was deleted."""
    await connection.execute(table.delete().where(table.c.conversation == conversation))
