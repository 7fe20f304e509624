"""Backups of what control and the orchestrator store: made while they write, restored over nothing but with --force."""

from __future__ import annotations

import io
import sqlite3
from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa
from sqlalchemy.engine import URL

import control.backup
import orchestrator.backup
from kvloom_common.config import KvloomConfig
from kvloom_common.database.backup import BackupError, DatabaseCopy, rows_in
from kvloom_common.database.backup_command import BackupRequest
from kvloom_common.database.database import Database, make_engine, open_database, with_driver
from kvloom_common.database.opening import migrate
from tests.fakes.postgres_server import find_postgres, postgres_server
from tests.fakes.state_world import state_world

CONTROL = control.backup.SCHEMA
TABLES = CONTROL.metadata.tables


def config_of(folder: Path, control_url: str = "") -> KvloomConfig:
    config = KvloomConfig(data_dir=str(folder))
    config.control.database_url = control_url
    return config


def sqlite_url(folder: Path) -> URL:
    return URL.create("sqlite+aiosqlite", database=str(folder / "control.db"))


async def organisations(url: URL) -> list[str]:
    database = Database(make_engine(url))
    async with database.reading() as connection:
        found = (await connection.scalars(sa.select(TABLES["organisations"].c.id))).all()
    await database.close()
    return sorted(found)


def organisation(name: str) -> sa.Insert:
    return sa.insert(TABLES["organisations"]).values(id=name, limits={"rpm": 2**40}, disabled=False, created_at=1.5)


async def filled(url: URL, *names: str) -> None:
    async with open_database(url) as database:
        await migrate(database, CONTROL.steps)
        async with database.writing() as connection:
            for name in names:
                await connection.execute(organisation(name))
                await connection.execute(
                    sa.insert(TABLES["usage_records"]).values(
                        producer="router-0",
                        number=len(name),
                        request_id=name,
                        answer_id="",
                        ended_at=2.0,
                        record=b"\0\xff",
                    )
                )


async def back_up(config: KvloomConfig, folder: Path) -> DatabaseCopy:
    folder.mkdir(exist_ok=True)  # noqa: ASYNC240
    return await control.backup.perform(config, BackupRequest(folder, None, False))


async def restore(config: KvloomConfig, folder: Path, copy: DatabaseCopy, *, replaces: bool = False) -> None:
    await control.backup.perform(config, BackupRequest(folder, copy, replaces))


async def test_a_backup_is_one_state_while_the_service_writes(tmp_path: Path) -> None:
    """Half of a transaction, such as usage without its counts, would be worse than none."""
    url = sqlite_url(tmp_path)
    await filled(url, "acme")
    async with open_database(url) as database, database.writing() as connection:  # the service
        await connection.execute(organisation("half"))
        copy = await back_up(config_of(tmp_path), tmp_path / "backup")
    assert [row["id"] for row in rows_in(tmp_path / "backup" / "control.rows", TABLES["organisations"])] == ["acme"]
    assert copy.num_rows == sum(
        1 for table in TABLES.values() for _ in rows_in(tmp_path / "backup/control.rows", table)
    )
    assert (tmp_path / "backup" / "control.rows").stat().st_mode & 0o077 == 0


async def test_what_is_restored_is_what_was_there(tmp_path: Path) -> None:
    """All rows of all tables, whatever their types."""
    await filled(sqlite_url(tmp_path), "acme", "other-one")
    copy = await back_up(config_of(tmp_path), tmp_path / "backup")
    other = tmp_path / "other"
    await restore(config_of(other), tmp_path / "backup", copy)
    dumps = []
    for folder in (tmp_path, other):
        with sqlite3.connect(folder / "control.db") as database:
            dumps.append(sorted(line for line in database.iterdump() if line.startswith("INSERT")))
        database.close()
    assert dumps[0] == dumps[1]
    assert sum("usage_records" in line for line in dumps[0]) == 2


async def test_data_that_is_there_is_replaced_only_when_asked_to(tmp_path: Path) -> None:
    """A restore into the wrong place must not cost a month of usage."""
    await filled(sqlite_url(tmp_path), "acme")
    copy = await back_up(config_of(tmp_path), tmp_path / "backup")
    other = tmp_path / "other"
    await filled(sqlite_url(other), "precious")
    with pytest.raises(BackupError, match=r"has data .*organisations.*--force"):
        await restore(config_of(other), tmp_path / "backup", copy)
    assert await organisations(sqlite_url(other)) == ["precious"]
    await restore(config_of(other), tmp_path / "backup", copy, replaces=True)
    assert await organisations(sqlite_url(other)) == ["acme"]


async def test_a_damaged_backup_changes_nothing(tmp_path: Path) -> None:
    """Disks rot, and copies are cut off."""
    await filled(sqlite_url(tmp_path), "acme")
    copy = await back_up(config_of(tmp_path), tmp_path / "backup")
    file = tmp_path / "backup" / "control.rows"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(BackupError, match="SHA-256"):
        await restore(config_of(tmp_path), tmp_path / "backup", copy, replaces=True)
    assert await organisations(sqlite_url(tmp_path)) == ["acme"]
    file.write_bytes(content)
    wrong = msgspec.structs.replace(copy, num_rows=copy.num_rows + 1)
    with pytest.raises(BackupError, match="rows"):
        await restore(config_of(tmp_path), tmp_path / "backup", wrong, replaces=True)
    assert await organisations(sqlite_url(tmp_path)) == ["acme"]


async def test_another_schema_is_refused(tmp_path: Path) -> None:
    """Rows of another version do not fit, and the version that fits can be named."""
    await filled(sqlite_url(tmp_path), "acme")
    copy = await back_up(config_of(tmp_path), tmp_path / "backup")
    with pytest.raises(BackupError, match="no backup of orchestrator"):
        await orchestrator.backup.perform(
            config_of(tmp_path / "x"), BackupRequest(_renamed(tmp_path / "backup"), copy, False)
        )
    async with open_database(sqlite_url(tmp_path)) as database, database.writing() as connection:
        await connection.execute(sa.text("UPDATE schema_version SET version_num = 'r0001'"))
    with pytest.raises(BackupError, match=r"r0001.*start the service"):
        await back_up(config_of(tmp_path), tmp_path / "again")
    with pytest.raises(BackupError, match="there is no database"):
        await back_up(config_of(tmp_path / "nothing"), tmp_path / "again")


def _renamed(folder: Path) -> Path:
    (folder / "control.rows").rename(folder / "orchestrator.rows")
    return folder


async def test_files_are_backed_up_with_their_contents(tmp_path: Path) -> None:
    """The contents of files are not in SQL; those that were deleted are in no backup."""
    source, backup, target = tmp_path / "source", tmp_path / "backup", tmp_path / "target"
    source.mkdir()
    backup.mkdir()
    async with state_world(f"sqlite:///{source}/orchestrator.db", source) as world:
        kept = await world.client.files.create(file=("a.txt", io.BytesIO(b"kept" * 100_000)), purpose="user_data")
        gone = await world.client.files.create(file=("b.txt", io.BytesIO(b"gone")), purpose="user_data")
        lost = await world.client.files.create(file=("c.txt", io.BytesIO(b"lost")), purpose="user_data")
        await world.client.files.delete(gone.id)
        await world.contents.delete(lost.id)
        copy = await orchestrator.backup.perform(config_of(source), BackupRequest(backup, None, False))
    assert list(copy.lost_files) == [lost.id]
    assert [path.name for path in (backup / "files").iterdir()] == [kept.id]
    await orchestrator.backup.perform(config_of(target), BackupRequest(backup, copy, False))
    async with state_world(f"sqlite:///{target}/orchestrator.db", target) as world:
        assert (await world.client.files.content(kept.id)).content == b"kept" * 100_000
    (backup / "files" / kept.id).unlink()
    with pytest.raises(BackupError, match="missing from the backup"):
        await orchestrator.backup.perform(config_of(tmp_path / "x"), BackupRequest(backup, copy, False))


@pytest.mark.long  # a server starts for it alone
@pytest.mark.postgres
@pytest.mark.skipif(find_postgres() is None, reason="PostgreSQL is not installed")
async def test_postgresql_gets_what_sqlite_had(tmp_path: Path) -> None:
    """A fabric outgrows its file. Numbers that PostgreSQL gives continue after those that were restored."""
    await filled(sqlite_url(tmp_path), "acme")
    audit = TABLES["audit"]
    async with open_database(sqlite_url(tmp_path)) as database, database.writing() as connection:
        columns = {column.name: _some(column) for column in audit.columns if not column.nullable}
        await connection.execute(sa.insert(audit).values(columns | {"number": 7}))
    copy = await back_up(config_of(tmp_path), tmp_path / "backup")
    binaries = find_postgres()
    assert binaries is not None
    with postgres_server(binaries) as server:
        url = f"postgresql:///postgres?host={server.folder}&user=postgres"
        await restore(config_of(tmp_path, url), tmp_path / "backup", copy)
        asynchronous = with_driver(sa.engine.make_url(url))
        assert await organisations(asynchronous) == ["acme"]
        async with open_database(asynchronous) as database, database.writing() as connection:
            del columns["number"]
            number = await connection.scalar(sa.insert(audit).values(columns).returning(audit.c.number))
        assert number == 8
        with pytest.raises(BackupError, match="has data"):
            await restore(config_of(tmp_path, url), tmp_path / "backup", copy)
        back = await back_up(config_of(tmp_path, url), tmp_path / "back")
        assert back.num_rows == copy.num_rows + 1


def _some(column: sa.Column) -> object:
    return {"JSON": {}, "DOUBLE": 1.0, "BOOLEAN": False, "TEXT": "x"}.get(str(column.type).upper(), 1)
