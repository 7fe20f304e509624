"""Deletes what has expired, or was kept for long enough, a batch at a time. What has expired is not shown, deleted or
not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from typing import Final

import sqlalchemy as sa
import structlog

from kvloom.errors import KvloomError
from kvloom_common.database.database import DATABASE_ERRORS, Database, database_error
from kvloom_common.process.cancellation import raise_if_cancelled
from orchestrator.database.schema import objects
from orchestrator.files.contents import ORPHAN_SECONDS, FileContents
from orchestrator.metrics import EXPIRED
from orchestrator.store import retention
from orchestrator.store.objects import delete

log = structlog.get_logger()

PAUSE_SECONDS: Final = 30.0
WITH_CONTENT: Final = ("file", "upload_part")
"""The kinds of objects that have a content in the store of files."""
MAX_DELETED: Final = 500
"""In one transaction."""


async def delete_expired(database: Database, contents: FileContents, now: float) -> int:
    """Returns how many objects were deleted."""
    return await _delete_where(database, contents, objects.c.expires_at <= now)


async def delete_old(database: Database, contents: FileContents, max_days: int, now: float) -> int:
    """Deletes what no tenant may keep any longer. `max_days`: the operator's bound; 0: there is none."""
    return await _delete_where(database, contents, retention.is_too_old(max_days, now))


async def _delete_where(database: Database, contents: FileContents, is_over: sa.ColumnElement[bool]) -> int:
    async with database.writing() as connection:
        wanted = sa.select(objects.c.id, objects.c.kind).where(is_over).limit(MAX_DELETED)
        expired = (await connection.execute(wanted)).all()
        if expired:
            await delete(connection, [one.id for one in expired])
    for one in expired:
        if one.kind in WITH_CONTENT:
            await contents.delete(one.id)
    return len(expired)


async def delete_orphans(database: Database, contents: FileContents) -> None:
    """Deletes contents of which there is no file any more, or not yet after an hour: a process was killed between the
    two."""

    async def known(ids: Collection[str]) -> Sequence[str]:
        async with database.reading() as connection:
            return (await connection.scalars(sa.select(objects.c.id).where(objects.c.id.in_(ids)))).all()

    for file_id in await contents.orphans(known):
        await contents.delete(file_id)


async def keep_deleting(database: Database, contents: FileContents, max_days: int) -> None:
    """Runs until it is cancelled. Once an hour it looks for orphans, and for what is too old (see `delete_old`)."""
    hourly_at = 0.0
    while True:
        num_deleted = 0
        try:
            num_deleted = await database.uninterrupted(delete_expired(database, contents, time.time()))
            if time.monotonic() >= hourly_at:
                old = await database.uninterrupted(delete_old(database, contents, max_days, time.time()))
                num_deleted = max(num_deleted, old)
                if old < MAX_DELETED:
                    hourly_at = time.monotonic() + ORPHAN_SECONDS
                    await database.uninterrupted(delete_orphans(database, contents))
        except DATABASE_ERRORS as error:
            database_error("expiry", error)
        except KvloomError as error:
            log.warning("file_deletion_failed", cause=error.message)
        EXPIRED.inc(num_deleted)
        raise_if_cancelled()
        if num_deleted < MAX_DELETED:
            await asyncio.sleep(PAUSE_SECONDS)
