"""Connections to the database, and transactions in it.

    async with open_database(url) as database:
        async with database.writing() as connection:
            await connection.execute(...)

On SQLite, writing transactions take the write lock when they begin. (With the driver's own BEGIN, a transaction that
reads and then updates what it has read silently loses the updates of others.)
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

BUSY_SECONDS: Final = 30.0
"""How long a writer on SQLite waits for another one."""
MAX_CONNECTIONS: Final = 8
_READ_ONLY: Final = "kvloom_read_only"


class DatabaseInUseError(Exception):
    """Another process has the SQLite database. The message names the file."""


class Database:
    """Open until the context of `open_database` ends."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine

    @property
    def is_sqlite(self) -> bool:
        return self.engine.dialect.name == "sqlite"

    @contextlib.asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncConnection]:
        """A transaction, which is committed at the end and rolled back after an exception. On PostgreSQL, rows that
        are read and then updated need `with_for_update`."""
        async with self.engine.begin() as connection:
            yield connection

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        """A transaction that sees one state of the database throughout, and writes nothing."""
        options: dict[str, Any] = (
            {_READ_ONLY: True}
            if self.is_sqlite
            else {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
        )
        async with self.engine.connect() as connection:
            connection = await connection.execution_options(**options)
            async with connection.begin():
                yield connection


@contextlib.asynccontextmanager
async def open_database(url: URL) -> AsyncIterator[Database]:
    """A SQLite file is made if there is none, readable by its owner only, and belongs to this process until the end of
    the context. Raises DatabaseInUseError, OSError."""
    with _own_file(Path(url.database or "")) if url.get_backend_name() == "sqlite" else contextlib.nullcontext():
        engine = make_engine(url)
        try:
            yield Database(engine)
        finally:
            await engine.dispose()


def make_engine(url: URL) -> AsyncEngine:
    options: dict[str, Any] = {
        "pool_size": MAX_CONNECTIONS,
        "max_overflow": 0,
        "json_serializer": _json,
        "json_deserializer": msgspec.json.decode,
    }
    if url.get_backend_name() != "sqlite":
        return create_async_engine(url, pool_pre_ping=True, **options)
    engine = create_async_engine(
        url,
        **options,
        connect_args={"isolation_level": None, "timeout": BUSY_SECONDS},  # None: BEGIN is ours
    )
    event.listen(engine.sync_engine, "connect", _prepare_sqlite)
    event.listen(engine.sync_engine, "begin", _begin_sqlite)
    return engine


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    cursor = connection.cursor()
    for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: sa.Connection) -> None:
    is_read_only = connection.get_execution_options().get(_READ_ONLY, False)
    connection.exec_driver_sql("BEGIN" if is_read_only else "BEGIN IMMEDIATE")


@contextlib.contextmanager
def _own_file(path: Path) -> Iterator[None]:
    """Make the file, and hold its lock. The lock goes with the process, however that ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    # A file of its own: closing any descriptor of the database itself would drop SQLite's locks.
    lock = os.open(path.with_name(path.name + ".lock"), os.O_CREAT | os.O_RDWR, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DatabaseInUseError(
                f"another control service has the database {path}; several need PostgreSQL (control.database_url)"
            ) from None
        yield
    finally:
        os.close(lock)
