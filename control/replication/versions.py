"""Waits for the next version of the table. A change that was made through this process is known at once, and one that
another process has made in the same PostgreSQL database as well, since the database announces each version.

An announcement may not arrive: a pooler stands between, or an earlier version of control has made the change. So the
version is also looked up now and then, and in short intervals while the latest one was not announced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final, NamedTuple

import sqlalchemy as sa
import structlog
from sqlalchemy.ext.asyncio import AsyncConnection

from control.database.schema import changes, table_state
from control.directory.transaction import VERSIONS_CHANNEL
from kvloom_common.database.database import DATABASE_ERRORS, Database

log = structlog.get_logger()


CHECK_SECONDS: Final = 1.0
"""How often the version is looked up while announcements arrive."""
POLL_SECONDS: Final = 0.05
"""The version is looked up this often while the latest one was not announced."""
_RETRY_SECONDS: Final = 1.0


class Versions:
    """`run` listens, where another process may change the database."""

    def __init__(self, database: Database, *, check_seconds: float = CHECK_SECONDS) -> None:
        self._database = database
        self._check_seconds = check_seconds
        self._announced = 0
        """The highest version that the database has announced."""
        self._changed = asyncio.Event()
        self._num_waiting = 0
        self.closed = asyncio.Event()

    @property
    def is_closed(self) -> bool:
        return self.closed.is_set()

    def close(self) -> None:
        """The service stops: followers are sent nothing more."""
        self.closed.set()
        self.notify()

    def notify(self) -> None:
        """The table may have another version."""
        self._changed.set()
        self._changed = asyncio.Event()

    def next_change(self) -> asyncio.Event:
        """An event that the next change sets. Take it before you read the version."""
        return self._changed

    async def wait(self, event: asyncio.Event) -> None:
        self._num_waiting += 1
        try:
            await event.wait()
        finally:
            self._num_waiting -= 1

    async def run(self) -> None:
        """Runs until it is cancelled; returns at once for SQLite, whose file belongs to this process."""
        if self._database.is_sqlite:
            return
        while True:
            try:
                async with self._database.listening(VERSIONS_CHANNEL, self._on_announced) as connection:
                    await self._watch(connection)
            except DATABASE_ERRORS as error:
                log.warning("database_read_failed", cause=type(error).__name__)
            await asyncio.sleep(_RETRY_SECONDS)

    async def _watch(self, connection: AsyncConnection) -> None:
        """Never returns. Raises what transactions raise."""
        begun_with = known = await self._database.uninterrupted(_version(connection))
        self.notify()  # whatever has changed before
        while True:
            is_announced = known == begun_with or known <= self._announced
            await asyncio.sleep(self._check_seconds if is_announced else POLL_SECONDS)
            if not self._num_waiting:
                continue
            version = await self._database.uninterrupted(_version(connection))
            if version > max(known, self._announced):
                self.notify()
            known = version

    def _on_announced(self, version: str) -> None:
        if version.isdecimal():
            self._announced = max(self._announced, int(version))
        self.notify()


async def _version(connection: AsyncConnection) -> int:
    return (await read_state(connection)).version


class TableState(NamedTuple):
    table_id: str
    version: int
    oldest_version: int
    """Changes since this version are known."""


async def read_state(connection: AsyncConnection) -> TableState:
    columns = (table_state.c.table_id, table_state.c.version, table_state.c.oldest_version)
    return TableState(*(await connection.execute(sa.select(*columns))).one())


async def read_changes(connection: AsyncConnection, after: int, until: int) -> Mapping[str, set[str]]:
    """Returns the entries, by their kind, that have changed after one version until another one."""
    query = sa.select(changes.c.kind, changes.c.entry).where(changes.c.version > after, changes.c.version <= until)
    found: dict[str, set[str]] = {}
    for kind, entry in await connection.execute(query.distinct()):
        found.setdefault(kind, set()).add(entry)
    return found
