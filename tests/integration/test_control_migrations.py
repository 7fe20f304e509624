"""A migration that is cut off by the death of its process: the next start does all of it, and nothing is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import make_url

from control.database.migrate import migrate, migrate_back
from kvloom_common.database.database import open_database, with_driver
from tests.integration.test_control_database import shape

BEFORE = "r0005"
ORGANISATION = "INSERT INTO organisations (id, limits, disabled, created_at) VALUES ('acme', '{}', false, 1)"
CUT_OFF = """
import asyncio, signal, sys
import sqlalchemy as sa
from sqlalchemy.engine import make_url
from kvloom_common.database.database import open_database
from control.database.migrate import migrate
from kvloom_common.database.database import with_driver

async def main(url, at):
    count = 0
    async with open_database(with_driver(make_url(url))) as database:
        @sa.event.listens_for(database.engine.sync_engine, "after_cursor_execute")
        def stop(connection, cursor, statement, *more):
            nonlocal count
            count += statement.lstrip().upper().startswith(("CREATE", "ALTER", "INSERT", "UPDATE", "DROP"))
            if count == at:
                print(statement.split()[0], flush=True)
                signal.pause()
        await migrate(database)
    print("END", flush=True)

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=(pytest.mark.postgres, pytest.mark.long))])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/control.db" if request.param == "sqlite" else request.getfixturevalue("postgres_url")


def killed_in_migration(url: str, at: int) -> str:
    """Starts a process that migrates, and kills it after so many statements. Returns how the last one begins; "END":
    all are done."""
    with subprocess.Popen([sys.executable, "-c", CUT_OFF, url, str(at)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            return process.stdout.readline().strip()
        finally:
            process.kill()


@pytest.mark.parametrize("at", [12, *(pytest.param(at, marks=pytest.mark.long) for at in (1, 2, 7, 20))])
async def test_a_migration_that_is_killed_is_done_by_the_next_start(database_url: str, at: int) -> None:
    """An upgrade may be killed by an impatient operator, by a rollout, or by a machine that goes."""
    url = with_driver(make_url(database_url))
    async with open_database(url) as database:
        await migrate(database)
        async with database.reading() as connection:
            wanted = await connection.run_sync(shape)
        await migrate_back(database, BEFORE)
        async with database.writing() as connection:
            await connection.execute(sa.text(ORGANISATION))
        async with database.reading() as connection:
            before = await connection.run_sync(shape)
    assert killed_in_migration(database_url, at) not in ("", "END")
    async with open_database(url) as database:
        async with database.reading() as connection:
            assert await connection.run_sync(shape) == before
        await migrate(database)
        async with database.reading() as connection:
            assert await connection.run_sync(shape) == wanted
            assert (await connection.scalars(sa.text("SELECT id FROM organisations"))).all() == ["acme"]
