"""Connections to the database, and transactions in it.

    async with open_database(url) as database:
        async with database.writing() as connection:
            await connection.execute(...)

Work that may be cancelled, such as that of an RPC or of a task, runs its transactions by `uninterrupted`. A database
closes once all of its transactions have ended: a connection that comes back to a pool afterwards is never closed.

On SQLite, writing transactions take the write lock when they begin. (With the driver's own BEGIN, a transaction that
reads and then updates what it has read silently loses the updates of others.)

Turns failures of the database into the error that a caller gets.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import math
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import sqlalchemy as sa
import sqlalchemy.exc
import structlog
from sqlalchemy import event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from kvloom.errors import KvloomError, invalid_argument
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.config import ConfigError
from kvloom_common.private_file import make_private, make_private_folder, open_private_file

DATABASE_ERRORS: Final = (SQLAlchemyError, OSError)
"""Transactions raise one of these. A server that does not answer is a TimeoutError, which is an OSError."""
NO_ANSWER: Final = "does not answer. A change that was asked for may still be made."
_IN_WORDS: Final = (
    # SQLite's messages, and PostgreSQL's codes.
    (("database is locked", "table is locked"), ("55P03",), "is locked by another process."),
    (("database or disk is full", "disk I/O error"), ("53100", "58030"), "has a disk that is full or fails."),
    (("malformed", "file is not a database"), ("XX001", "XX002"), "is damaged: restore a backup."),
    (("readonly database",), ("25006",), "takes no changes at the moment."),
)
_DATA_EXCEPTION: Final = "22"
"""The class of PostgreSQL's codes for values that it cannot store."""
RETRY_SECONDS: Final = 1.0
MAX_CAUSE_CHARS: Final = 300


class DatabaseAwayError(OSError):
    """There is no connection to the database's server."""


def database_error(
    method: str, error: Exception, reason: int = ErrorReason.ERROR_REASON_CONTROL_UNAVAILABLE, name: str = "of tenants"
) -> KvloomError:
    """The error for a caller, with this reason, about the database of that name. The log has the cause, which may
    contain names of tenants."""
    code = str(getattr(getattr(error, "orig", None), "sqlstate", None) or "")
    if code.startswith(_DATA_EXCEPTION):
        return invalid_argument("The database can store no such value.", "")
    words = _in_words(error, code)
    log.error(
        "database_failed",
        method=method,
        cause=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:MAX_CAUSE_CHARS],
        exc_info=None if words else error,  # only what is not understood: there may be many while a server is away
    )
    return KvloomError(
        reason,
        f"The database {name} {words or 'fails at the moment.'}",
        retry_after_seconds=RETRY_SECONDS,
    )


def _in_words(error: Exception, code: str) -> str:
    """ "" for what is not known."""
    if isinstance(error, TimeoutError):
        return NO_ANSWER
    shown = str(error)
    found = (words for texts, codes, words in _IN_WORDS if code in codes or any(text in shown for text in texts))
    away = "cannot be reached." if isinstance(error, OSError) or getattr(error, "connection_invalidated", False) else ""
    return next(found, away)


log = structlog.get_logger()


LOCK_SECONDS: Final = 1.5
"""How long a transaction waits for one of another process: on SQLite for the file, on PostgreSQL for each lock."""
CONNECT_SECONDS: Final = 2.0
STATEMENT_SECONDS: Final = 60.0
"""How long PostgreSQL may take for a connection, and for a statement."""
MAX_CONNECTIONS: Final = 8
_READ_ONLY: Final = "kvloom_read_only"

T = TypeVar("T")


class DatabaseInUseError(Exception):
    """Another process has the SQLite database. The message names the file."""


class Database:
    """Open until the context of `open_database` ends."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self._running: set[asyncio.Task[Any]] = set()
        self._num_connected = 0
        """How many transactions and listeners have a connection, or wait for one."""
        self._came_back = asyncio.Event()
        self._is_closed = False
        self._writer = asyncio.Lock()
        """SQLite has one writer at a time. Those of this process take turns, however long one takes, so that only
        another process is waited for in vain."""
        self._locked_at = -math.inf
        """When a writer last has waited in vain, by the event loop's clock."""

    @property
    def is_sqlite(self) -> bool:
        return self.engine.dialect.name == "sqlite"

    @contextlib.asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncConnection]:
        """A transaction, which is committed at the end and rolled back after an exception. On PostgreSQL, rows that
        are read and then updated need `with_for_update`."""
        if not self.is_sqlite:
            async with self._connected() as connection, connection.begin():
                yield connection
            return
        clock = asyncio.get_running_loop().time
        asked_at = clock()
        async with self._writer:
            if asked_at <= self._locked_at:
                raise DatabaseAwayError("database is locked")  # it was while this one waited for its turn
            async with contextlib.AsyncExitStack() as stack:
                try:
                    connection = await stack.enter_async_context(self._connected())
                    await stack.enter_async_context(connection.begin())
                except sqlalchemy.exc.OperationalError:
                    self._locked_at = clock()
                    raise
                yield connection

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        """A transaction that sees one state of the database throughout, and writes nothing."""
        options: dict[str, Any] = (
            {_READ_ONLY: True}
            if self.is_sqlite
            else {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
        )
        async with self._connected() as connection:
            connection = await connection.execution_options(**options)
            async with connection.begin():
                yield connection

    @contextlib.asynccontextmanager
    async def listening(self, channel: str, on_notice: Callable[[str], None]) -> AsyncIterator[AsyncConnection]:
        """A connection to PostgreSQL, without transactions. What is notified on `channel` meanwhile, `on_notice` gets.
        Raises DatabaseAwayError."""
        async with self._connected() as connection:
            connection = await connection.execution_options(isolation_level="AUTOCOMMIT")
            driver: Any = (await connection.get_raw_connection()).driver_connection
            try:
                await driver.add_listener(channel, lambda *notice: on_notice(notice[-1]))
            except Exception as error:  # SQLAlchemy does not see what the driver is asked for
                raise DatabaseAwayError(f"{type(error).__name__}: {error}") from error
            try:
                yield connection
            finally:
                await connection.invalidate()  # the next user of the connection must not be the listener

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[AsyncConnection]:
        """Raises DatabaseAwayError if a server cannot be reached, or the database is closed."""
        if self._is_closed:
            raise DatabaseAwayError("the database is closed")
        self._num_connected += 1
        try:
            async with contextlib.AsyncExitStack() as stack:
                try:
                    connection = await stack.enter_async_context(self.engine.connect())
                except Exception as error:
                    # SQLAlchemy passes on what asyncpg raises where there is no connection yet, e.g. while a server
                    # starts.
                    if type(error).__module__.startswith("asyncpg"):
                        raise DatabaseAwayError(f"{type(error).__name__}: {error}") from error
                    raise
                yield connection
        finally:
            self._num_connected -= 1
            self._came_back.set()

    async def forget_deleted(self) -> bool:
        """On SQLite, empties the log of writes, so that no file has what was deleted any more. Returns False while a
        reader still sees an earlier state. PostgreSQL keeps deleted rows until its own vacuum."""
        if not self.is_sqlite:
            return True
        async with self._writer, self._connected() as connection:
            driver: Any = (await connection.get_raw_connection()).driver_connection
            async with driver.execute("PRAGMA wal_checkpoint(TRUNCATE)") as cursor:
                is_busy, *_ = await cursor.fetchone()
            return not is_busy

    async def uninterrupted(self, work: Coroutine[Any, Any, T], answer_seconds: float | None = None) -> T:
        """Await work with transactions, to its end even if the caller is cancelled meanwhile: the drivers do not
        survive a cancellation in the middle of a statement (aiosqlite's thread may never answer again). With
        `answer_seconds`, raises TimeoutError when it takes longer, and the work continues."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await _to_its_end(task, answer_seconds)

    async def close(self) -> None:
        """Returns when no transaction is running and no connection is open, also if the caller is cancelled meanwhile.
        What begins later is refused."""
        await _to_its_end(asyncio.create_task(self._close()))

    async def _close(self) -> None:
        while self._running or self._num_connected:
            self._came_back.clear()
            await (asyncio.wait(self._running) if self._running else self._came_back.wait())
        self._is_closed = True
        await self.engine.dispose()


async def _to_its_end(task: asyncio.Task[T], answer_seconds: float | None = None) -> T:
    """The task's result. A caller who is cancelled meanwhile waits for the task's end all the same."""
    try:
        if answer_seconds is not None and not (await asyncio.wait((task,), timeout=answer_seconds))[0]:
            task.add_done_callback(_forget_failure)
            raise TimeoutError
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):  # the caller is about to end anyway
                await asyncio.wait((task,))
        if not task.cancelled():
            task.exception()  # the cancellation replaces it
        raise


@contextlib.asynccontextmanager
async def open_database(url: URL) -> AsyncIterator[Database]:
    """A SQLite file is made if there is none, readable by its owner only, and belongs to this process until the end of
    the context. Raises DatabaseInUseError, OSError."""
    with _own_file(Path(url.database or "")) if url.get_backend_name() == "sqlite" else contextlib.nullcontext():
        database = Database(make_engine(url))
        try:
            yield database
        finally:
            await database.close()


def make_engine(url: URL) -> AsyncEngine:
    options: dict[str, Any] = {
        "pool_size": MAX_CONNECTIONS,
        "max_overflow": 0,
        "json_serializer": _json,
        "json_deserializer": msgspec.json.decode,
    }
    if url.get_backend_name() != "sqlite":
        timeouts = {
            "timeout": CONNECT_SECONDS,
            "command_timeout": STATEMENT_SECONDS,
            "server_settings": {"lock_timeout": f"{LOCK_SECONDS * 1e3:.0f}"},
        }
        return create_async_engine(url, pool_pre_ping=True, connect_args=timeouts, **options)
    engine = create_async_engine(
        url,
        **options,
        connect_args={"isolation_level": None, "timeout": LOCK_SECONDS},  # None: BEGIN is ours
    )
    event.listen(engine.sync_engine, "connect", _prepare_sqlite)
    event.listen(engine.sync_engine, "begin", _begin_sqlite)
    return engine


def _forget_failure(task: asyncio.Task[Any]) -> None:
    """The caller was told already that there is no answer."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("abandoned_query_failed", cause=type(error).__name__)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    cursor = connection.cursor()
    try:
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON", "secure_delete = ON"):
            cursor.execute(f"PRAGMA {pragma}")
    except BaseException:
        connection.close()  # SQLAlchemy only forgets it, with its thread
        raise
    cursor.close()


def _begin_sqlite(connection: sa.Connection) -> None:
    is_read_only = connection.get_execution_options().get(_READ_ONLY, False)
    connection.exec_driver_sql("BEGIN" if is_read_only else "BEGIN IMMEDIATE")


@contextlib.contextmanager
def _own_file(path: Path) -> Iterator[None]:
    """Make the file, and hold its lock. The lock goes with the process, however that ends."""
    make_private_folder(path.parent)
    os.close(open_private_file(path, os.O_CREAT | os.O_RDWR))  # SQLite gives its mode to the files beside it
    for name in ("-wal", "-shm"):  # left by a process that was killed
        with contextlib.suppress(FileNotFoundError):
            make_private(path.with_name(path.name + name))
    # A file of its own: closing any descriptor of the database itself would drop SQLite's locks.
    lock = open_private_file(path.with_name(path.name + ".lock"), os.O_CREAT | os.O_RDWR)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DatabaseInUseError(
                f"another process has the database {path}; several need PostgreSQL (database_url)"
            ) from None
        yield
    finally:
        os.close(lock)


_DRIVERS: Final = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg"}


def database_url(configured: str, key: str, default: Path) -> URL:
    """The configured database, or a SQLite file at `default`. `key`: that of the configuration. Raises ConfigError."""
    if not configured:
        return URL.create(_DRIVERS["sqlite"], database=str(default))
    try:
        return with_driver(make_url(configured))
    except (ArgumentError, ValueError) as error:
        raise ConfigError(f"{key}: {error}") from None


def with_driver(url: URL) -> URL:
    """The URL with the asynchronous driver of its database. Raises ValueError, whose message has no password."""
    driver = _DRIVERS.get(url.get_backend_name())
    if driver is None:
        raise ValueError(f"{url.get_backend_name()!r} is neither postgresql nor sqlite")
    if url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
        raise ValueError("SQLite needs the path of a file: sqlite:///PATH, or sqlite:////PATH for an absolute one")
    return url.set(drivername=driver)
