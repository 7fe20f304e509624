"""Copies all rows of a service's database to a file, and back.

The file is a header and then a row after another, in msgpack. It has one state of the database, also while the service
writes, and says nothing of the kind of database: what SQLite had, PostgreSQL can get.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import msgspec
import sqlalchemy as sa
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncConnection

from kvloom_common.database.database import Database, make_engine, open_database
from kvloom_common.database.opening import migrate
from kvloom_common.private_file import replacement

FORMAT: Final = 1
_CHUNK_ROWS: Final = 1000
_LENGTH_BYTES: Final = 4
_MAX_ROW_BYTES: Final = 2**31


class BackupError(Exception):
    """The backup, or the restore, cannot be made. The message tells the operator why."""


class ServiceSchema(NamedTuple):
    """The tables of a service in this version."""

    service: str
    metadata: sa.MetaData
    steps: Path
    """The folder of the migration steps."""
    version_table: str
    """The name of the table in which Alembic keeps which steps were applied."""


class BackupHeader(msgspec.Struct, frozen=True):
    format: int
    service: str
    revision: str
    """The schema's version, by the last of the service's migration steps."""


class DatabaseCopy(msgspec.Struct, frozen=True):
    """A backup of a database, as the manifest lists it."""

    file: str
    sha256: str
    num_rows: int
    lost_files: Sequence[str] = ()
    """Files of which only the row is there, since their contents had been lost before."""


async def back_up(url: URL, schema: ServiceSchema, path: Path) -> DatabaseCopy:
    """Copy a database that a service may be using to a file. Raises BackupError, OSError, and what the database's
    driver raises."""
    if url.get_backend_name() == "sqlite" and not Path(url.database or "").exists():  # noqa: ASYNC240
        raise BackupError(f"there is no database {url.database}")
    database = Database(make_engine(url))  # without the lock of the process that owns it
    try:
        async with database.reading() as connection:
            header = BackupHeader(FORMAT, schema.service, await _known_revision(connection, schema))
            with replacement(path) as file:
                writer = _Writer(file)
                writer.write(msgspec.to_builtins(header))
                for table in schema.metadata.sorted_tables:
                    rows = await connection.stream(sa.select(table))
                    async for chunk in rows.partitions(_CHUNK_ROWS):
                        for row in chunk:
                            writer.write([str(table.name), list(row)])
    finally:
        await database.close()
    return DatabaseCopy(path.name, writer.digest.hexdigest(), writer.num_records - 1)


async def restore(url: URL, schema: ServiceSchema, path: Path, expected: DatabaseCopy, *, replaces: bool) -> None:
    """Write all rows of a file to a database, in one transaction. A database that has rows is refused unless
    `replaces`: then they are deleted. Raises BackupError, DatabaseInUseError, OSError, and what the database's driver
    raises."""
    _check_digest(path, expected)
    with path.open("rb") as file:
        records = _records(file, path)
        header = msgspec.convert(next(records, None), BackupHeader)
        if header.format != FORMAT or header.service != schema.service:
            raise BackupError(f"{path} is no backup of {schema.service} that this version reads")
        if header.revision != (newest := _newest(schema.steps)):
            raise BackupError(
                f"{path} has the schema {header.revision}, and this version of kvloom {newest}: restore it with the "
                "version that made it, and upgrade then"
            )
        async with open_database(url) as database:
            if not replaces and (filled := await _filled_tables(database, schema.metadata)):
                shown = url.render_as_string(hide_password=True)
                raise BackupError(f"{shown} has data ({', '.join(filled)}): --force replaces it")
            await migrate(database, schema.steps)
            async with database.writing() as connection:
                for table in reversed(schema.metadata.sorted_tables):
                    await connection.execute(sa.delete(table))
                num_rows = await _insert(connection, schema.metadata, records)
                if num_rows != expected.num_rows:
                    raise BackupError(f"{path} has {num_rows} rows, and the manifest says {expected.num_rows}")
                if not database.is_sqlite:
                    await _continue_numbers(connection, schema.metadata)


def rows_in(path: Path, table: sa.Table) -> Iterator[dict[str, Any]]:
    """The rows of one table in a backup. Raises BackupError and OSError."""
    with path.open("rb") as file:
        records = _records(file, path)
        next(records, None)  # the header
        for name, values in records:
            if name == table.name:
                yield dict(zip(table.columns.keys(), values, strict=True))


async def _insert(connection: AsyncConnection, metadata: sa.MetaData, records: Iterator[Any]) -> int:
    """Rows of one table follow one another, and tables follow those that they refer to."""
    pending: list[dict[str, Any]] = []
    of: sa.Table | None = None
    num_rows = 0
    for name, values in records:
        table = metadata.tables.get(name)
        if table is None or len(values) != len(table.columns):
            raise BackupError(f"the backup has a table {name!r} that this version does not know")
        if pending and (table is not of or len(pending) >= _CHUNK_ROWS):
            assert of is not None
            await connection.execute(sa.insert(of), pending)
            pending = []
        of = table
        pending.append(dict(zip(table.columns.keys(), values, strict=True)))
        num_rows += 1
    if pending:
        assert of is not None
        await connection.execute(sa.insert(of), pending)
    return num_rows


async def _continue_numbers(connection: AsyncConnection, metadata: sa.MetaData) -> None:
    """PostgreSQL counts by itself, and knows nothing of numbers that were inserted."""
    for table in metadata.sorted_tables:
        column = table.autoincrement_column
        if column is not None and column.autoincrement is True:
            highest = sa.select(sa.func.coalesce(sa.func.max(column), 0) + 1).scalar_subquery()
            sequence = sa.func.pg_get_serial_sequence(table.name, column.name)
            await connection.execute(sa.select(sa.func.setval(sequence, highest, False)))


async def _known_revision(connection: AsyncConnection, schema: ServiceSchema) -> str:
    versions = sa.table(schema.version_table, sa.column("version_num"))
    has_version = await connection.run_sync(lambda sync: sa.inspect(sync).has_table(schema.version_table))
    found = await connection.scalar(sa.select(versions.c.version_num)) if has_version else None
    newest = _newest(schema.steps)
    if found != newest:
        raise BackupError(
            f"the database has the schema {found or 'of no version'}, and this version of kvloom {newest}: start the "
            "service of this version once"
        )
    return newest


def _newest(steps: Path) -> str:
    """The schema of this version."""
    config = Config()
    config.set_main_option("script_location", str(steps))
    newest = ScriptDirectory.from_config(config).get_current_head()
    assert newest is not None
    return newest


async def _filled_tables(database: Database, metadata: sa.MetaData) -> list[str]:
    """The tables that are there and have rows."""
    async with database.reading() as connection:
        present = await connection.run_sync(lambda sync: set(sa.inspect(sync).get_table_names()))
        filled: list[str] = []
        for table in metadata.sorted_tables:
            if table.name in present:
                first = await connection.execute(sa.select(sa.literal(1)).select_from(table).limit(1))
                filled += [table.name] if first.first() is not None else []
        return filled


class _Writer:
    """Writes records, each after its length."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.num_records = 0

    def write(self, record: Any) -> None:
        content = msgspec.msgpack.encode(record)
        for part in (len(content).to_bytes(_LENGTH_BYTES, "big"), content):
            self._file.write(part)
            self.digest.update(part)
        self.num_records += 1


def _records(file: IO[bytes], path: Path) -> Iterator[Any]:
    """Raises BackupError."""
    while length := file.read(_LENGTH_BYTES):
        size = int.from_bytes(length, "big")
        content = file.read(size) if size <= _MAX_ROW_BYTES else b""
        if len(content) != size:
            raise BackupError(f"{path} is damaged")
        yield msgspec.msgpack.decode(content)


def _check_digest(path: Path, expected: DatabaseCopy) -> None:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != expected.sha256:
        raise BackupError(f"{path} is not the file that the manifest describes (its SHA-256 differs)")
