"""Opens a service's database when the service starts, with the tables of this version."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final

import sqlalchemy as sa
import structlog
from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy.engine import URL

from kvloom_common.database.database import DATABASE_ERRORS, Database, DatabaseInUseError, open_database
from kvloom_common.process.service import StartError

log = structlog.get_logger()


RETRY_SECONDS: Final = 1.0
PATIENCE_SECONDS: Final = 30.0
"""How long a start waits for a PostgreSQL server that does not answer."""


@contextlib.asynccontextmanager
async def opened(url: URL, steps: Path) -> AsyncIterator[Database]:
    """The database, after the migration steps of that folder. Raises StartError."""
    shown = url.render_as_string(hide_password=True)
    async with contextlib.AsyncExitStack() as stack:
        try:
            database = await stack.enter_async_context(open_database(url))
            await _migrate(database, steps, shown)
        except (DatabaseInUseError, MigrationError) as error:
            raise StartError(str(error)) from error
        except OSError as error:
            raise StartError(f"the database {shown} cannot be opened: {error.strerror or error}") from error
        yield database


async def _migrate(database: Database, steps: Path, shown: str) -> None:
    """Raises StartError and MigrationError. A PostgreSQL server that is only just starting is waited for."""
    deadline = asyncio.get_running_loop().time() + PATIENCE_SECONDS
    while True:
        try:
            return await database.uninterrupted(migrate(database, steps))
        except DATABASE_ERRORS as error:
            cause = str(getattr(error, "orig", None) or error).partition("\n")[0]
            # A file that is locked may be waited for, and nothing else that is wrong with one.
            is_lasting = database.is_sqlite and "locked" not in cause
            if is_lasting or asyncio.get_running_loop().time() >= deadline:
                raise StartError(f"the database {shown} cannot be used: {cause}") from error
            log.warning("database_awaited", database=shown, cause=cause)
            await asyncio.sleep(RETRY_SECONDS)


LOCK_SECONDS: Final = 60
_LOCK: Final = 0x6B766C6F6F6D  # "kvloom"; any number does that all processes agree on


class MigrationError(Exception):
    """The database cannot be brought to this version. The message tells the operator why."""


async def migrate(database: Database, folder: Path, revision: str = "head") -> None:
    """Apply all steps of a folder up to a revision that are missing, in one transaction. Several processes may do so at
    once: one does it, and the others wait. Raises MigrationError."""
    await _run(database, folder, lambda config: command.upgrade(config, revision))


async def migrate_back(database: Database, folder: Path, revision: str) -> None:
    """Undo all steps after a revision ("base": all). Their tables' rows are lost. Raises MigrationError."""
    await _run(database, folder, lambda config: command.downgrade(config, revision))


async def _run(database: Database, folder: Path, step: Callable[[Config], None]) -> None:
    def run(connection: sa.Connection) -> None:
        if not database.is_sqlite:  # there BEGIN IMMEDIATE has the lock already
            # Another process may take a while for the steps, after which there is nothing left to do.
            connection.execute(sa.text(f"SET LOCAL lock_timeout = '{LOCK_SECONDS}s'"))
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
        config = Config()
        config.set_main_option("script_location", str(folder))
        config.attributes["connection"] = connection
        try:
            step(config)
        except CommandError as error:
            raise MigrationError(
                f"the database has a schema that this version does not know; a newer one has used it ({error})"
            ) from error

    async with database.writing() as connection:
        await connection.run_sync(run)
