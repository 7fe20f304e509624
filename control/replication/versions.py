"""Waits for the next version of the table. A change that was made through this process is known at once, and one that
another process has made in the same PostgreSQL database within POLL_SECONDS."""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from control.database.database import Database
from control.database.failures import DATABASE_ERRORS
from control.replication.changelog import read_state

log = structlog.get_logger()

POLL_SECONDS: Final = 0.05
_RETRY_SECONDS: Final = 1.0


class Versions:
    """`run` polls, where another process may change the database."""

    def __init__(self, database: Database) -> None:
        self._database = database
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
        known = 0
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if not self._num_waiting:
                continue
            try:
                version = await self._database.uninterrupted(self._version())
            except DATABASE_ERRORS as error:
                log.warning("the database cannot be read", cause=type(error).__name__)
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            if version != known:
                known = version
                self.notify()

    async def _version(self) -> int:
        async with self._database.reading() as connection:
            return (await read_state(connection)).version
