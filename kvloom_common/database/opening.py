"""Opens a service's database when the service starts, with the tables of this version."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import structlog
from sqlalchemy.engine import URL

from kvloom_common.database.database import Database, DatabaseInUseError, open_database
from kvloom_common.database.failures import DATABASE_ERRORS
from kvloom_common.database.migrate import MigrationError, migrate
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
