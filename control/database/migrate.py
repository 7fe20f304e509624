"""Brings the database to the schema of this version. Alembic's steps are in migrations/versions."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvloom_common.database import opening as steps
from kvloom_common.database.database import Database

FOLDER: Final = Path(__file__).parent / "migrations"


async def migrate(database: Database, revision: str = "head") -> None:
    """Apply all steps up to a revision that are missing. Raises MigrationError."""
    await steps.migrate(database, FOLDER, revision)


async def migrate_back(database: Database, revision: str) -> None:
    """Undo all steps after a revision ("base": all). Their tables' rows are lost. Raises MigrationError."""
    await steps.migrate_back(database, FOLDER, revision)
