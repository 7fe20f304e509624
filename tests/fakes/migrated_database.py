"""Open databases of the newest schema. The steps to it are the matter of other tests (test_control_migrations.py); here
they would be most of what a test takes."""

from __future__ import annotations

import contextlib
import sqlite3
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from sqlalchemy.engine import make_url

from control.database.migrate import FOLDER
from kvloom_common.database.database import Database, open_database, with_driver
from kvloom_common.database.opening import migrate
from kvloom_common.private_file import write_private_file

_templates: dict[Path, bytes] = {}
"""SQLite files without rows, by the folder of their steps: this process has gone through these once."""


@contextlib.asynccontextmanager
async def migrated_database(database_url: str, steps: Path, first: str = "") -> AsyncIterator[Database]:
    """`database_url`: as in the configuration. A SQLite file that does not exist begins as a copy of a template, in
    which the statement `first` is executed: for what no two databases have in common."""
    url = with_driver(make_url(database_url))
    is_copy = url.get_backend_name() == "sqlite" and _make_file(Path(url.database or ""), await _template(steps), first)
    async with open_database(url) as database:
        if not is_copy:
            await migrate(database, steps)
        yield database


@contextlib.asynccontextmanager
async def control_database(database_url: str) -> AsyncIterator[Database]:
    """Control's, whose table of tenants has an id of its own."""
    own_id = "UPDATE table_state SET table_id = lower(hex(randomblob(16)))"
    async with migrated_database(database_url, FOLDER, own_id) as database:
        yield database


def _make_file(path: Path, content: bytes, first: str) -> bool:
    """False: there is one."""
    if path.exists():
        return False
    write_private_file(path, content)
    with contextlib.closing(sqlite3.connect(path)) as copy, copy:
        copy.execute(first)
    return True


async def _template(steps: Path) -> bytes:
    if steps not in _templates:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "template.db"
            async with open_database(with_driver(make_url(f"sqlite:///{path}"))) as database:
                await migrate(database, steps)
            _templates[steps] = path.read_bytes()
    return _templates[steps]
