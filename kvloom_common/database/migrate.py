"""Brings a database to the schema of this version by Alembic's steps, which are in the service's folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.util import CommandError

from kvloom_common.database.database import Database

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
