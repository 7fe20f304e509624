"""Control while its database is locked, away, hung, full or damaged: changes are refused in words and soon, what was
acknowledged is there afterwards, and edges and routers serve with the table that they have."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import sqlite3
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import sqlalchemy.exc
from prometheus_client import CollectorRegistry
from sqlalchemy import event
from sqlalchemy.engine import make_url

from control.service import directory_servicer
from control.usage.metrics import UsageMetrics
from control.usage.webhook import AlertSender
from kvloom.enums import ErrorReason
from kvloom.errors import KvloomError
from kvloom.v1 import usage_service_pb2 as usage_pb
from kvloom_common.access.tenant_follower import TenantFollower
from kvloom_common.config import ControlConfig, KvloomConfig
from kvloom_common.database.database import LOCK_SECONDS, Database, make_engine, with_driver
from kvloom_common.process.watched_files import following
from kvloom_common.trust.fabric_trust import NO_SECRET
from tests.fakes.control_world import ControlWorld, Pb, control_world
from tests.fakes.postgres_server import PostgresServer, find_postgres, make_postgres_database, postgres_server
from tests.waiting import eventually


async def make_key(world: ControlWorld, name: str = "") -> Any:
    return await world.ask("CreateKey", key=Pb.ApiKey(project="acme/search", name=name), create_project=True)


async def refused(world: ControlWorld, method: str = "CreateKey", **fields: Any) -> str:
    fields = fields or {"key": Pb.ApiKey(project="acme/search"), "create_project": True}
    with pytest.raises(KvloomError) as info:
        await world.ask(method, **fields)
    assert info.value.reason == ErrorReason.CONTROL_UNAVAILABLE
    assert info.value.retry_after_seconds
    return info.value.message


async def key_ids(world: ControlWorld) -> set[str]:
    found, token = set(), ""
    while True:
        page = await world.ask("ListKeys", page_token=token, page_size=1000)
        found |= {key.id for key in page.keys}
        if not (token := page.next_page_token):
            return found


@contextlib.asynccontextmanager
async def follower_of(world: ControlWorld, folder: Path) -> AsyncIterator[TenantFollower]:
    """An edge or a router that has the table."""
    config = KvloomConfig(data_dir=str(folder), control=ControlConfig(enabled=True, port=world.port))
    follower = TenantFollower(config, "router-0", NO_SECRET)
    async with following(follower):
        await eventually(lambda: follower.tenants.connected, "the table")
        yield follower


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    """A PostgreSQL server that a test may end."""
    binaries = find_postgres()
    if binaries is None:
        pytest.skip("PostgreSQL is not installed")
    with postgres_server(binaries) as server:
        yield server


@pytest.fixture
def server_url(server: PostgresServer) -> str:
    return make_postgres_database(server.folder, "control")


async def test_a_locked_database_is_a_clear_answer_within_two_seconds(tmp_path: Path) -> None:
    """Somebody has opened control.db with a shell, and every administrator waited for half a minute."""
    assert LOCK_SECONDS < 2.0
    async with control_world(f"sqlite:///{tmp_path}/control.db") as world, follower_of(world, tmp_path) as follower:
        made = await make_key(world)
        await eventually(lambda: follower.tenants.table.num_keys, "the key")
        with contextlib.closing(sqlite3.connect(tmp_path / "control.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            # However many ask, none waits for the others' waiting.
            for message in await asyncio.gather(*(refused(world) for _ in range(6))):
                assert message == "The database of tenants is locked by another process."
            assert await key_ids(world) == {made.key.id}
            assert follower.tenants.of_credential(made.secret).tenant == "acme/search"
            other.execute("ROLLBACK")
        second = await make_key(world)
        assert await key_ids(world) == {made.key.id, second.key.id}


@pytest.mark.postgres
async def test_locked_rows_are_a_clear_answer_within_two_seconds(postgres_url: str) -> None:
    """A transaction that somebody has forgotten holds the row on which all changes wait."""
    async with control_world(postgres_url) as world:
        made = await make_key(world)
        other = make_engine(with_driver(make_url(postgres_url)))
        async with other.connect() as connection, connection.begin():
            await connection.execute(sa.text("SELECT id FROM table_state FOR UPDATE"))
            assert await refused(world) == "The database of tenants is locked by another process."
            assert await key_ids(world) == {made.key.id}
        await other.dispose()
        assert (await make_key(world)).key.id


@pytest.mark.postgres
async def test_a_server_that_goes_and_comes_back_loses_nothing(
    server: PostgresServer, server_url: str, tmp_path: Path
) -> None:
    """PostgreSQL fails over: it is killed under load, away for a while, and starts again."""
    acknowledged: list[str] = []

    async def keep_making(world: ControlWorld) -> None:
        with contextlib.suppress(KvloomError):
            while True:
                acknowledged.append((await make_key(world)).key.id)

    async with control_world(server_url) as world, follower_of(world, tmp_path) as follower:
        metrics = UsageMetrics(CollectorRegistry())
        sender = AlertSender(world.database, ["http://127.0.0.1:1"], "whsec_c2VjcmV0", metrics, poll_seconds=0.01)
        background = [asyncio.create_task(world.versions.run()), asyncio.create_task(sender.run())]
        first = await make_key(world)
        makers = [asyncio.create_task(keep_making(world)) for _ in range(3)]
        await eventually(lambda: len(acknowledged) > 10, "some keys")
        server.kill()
        await asyncio.gather(*makers)
        assert "database of tenants" in await refused(world)
        assert "database of tenants" in await refused(world, "ListKeys", page_size=1)
        for call in (
            world.usage.GetUsage(usage_pb.GetUsageRequest()),
            world.usage.GetBudgets(usage_pb.GetBudgetsRequest(tenant="acme/search")),
        ):
            with pytest.raises(Exception, match="UNAVAILABLE"):
                await call
        assert follower.tenants.of_credential(first.secret).tenant == "acme/search"
        server.start()
        last = await make_key(world)
        assert {first.key.id, last.key.id, *acknowledged} <= await key_ids(world)
        await eventually(lambda: follower.tenants.table.key(last.key.id), "the change at the follower")
        assert all(follower.tenants.table.key(key_id) for key_id in acknowledged)
        for task in background:
            assert not task.done()  # it would have ended the process
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)


@pytest.mark.postgres
async def test_a_server_that_starts_or_hangs_is_a_clear_answer(
    server: PostgresServer, server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that answers nothing would hold each administrator for a minute, and each would try again."""
    monkeypatch.setattr(directory_servicer, "ANSWER_SECONDS", 0.5)
    async with control_world(server_url) as world:
        made = await make_key(world)
        server.freeze()
        try:
            assert await refused(world) == (
                "The database of tenants does not answer. A change that was asked for may still be made."
            )
        finally:
            server.thaw()
        await eventually_serves(world)
        assert made.key.id in await key_ids(world)


async def eventually_serves(world: ControlWorld) -> None:
    async with asyncio.timeout(30.0):
        while True:
            with contextlib.suppress(KvloomError):
                await world.ask("ListOrganisations")
                return


async def test_a_full_disk_refuses_changes_and_keeps_what_was_acknowledged(tmp_path: Path) -> None:
    """Serving needs no space in the database; a change that finds none must not seem to be made."""
    async with control_world(f"sqlite:///{tmp_path}/control.db") as world, follower_of(world, tmp_path) as follower:
        engine = world.database.engine.sync_engine

        def is_full(connection: sa.Connection) -> None:
            connection.exec_driver_sql("PRAGMA max_page_count = 1")  # as few as there are

        made = [await make_key(world)]
        await eventually(lambda: follower.tenants.table.num_keys, "the key")
        event.listen(engine, "begin", is_full)
        message = ""
        while not message:
            try:
                made.append(await make_key(world, "x" * 128))
            except KvloomError as error:
                message = error.message
        assert message == "The database of tenants has a disk that is full or fails."
        expected = {one.key.id for one in made}
        assert await key_ids(world) == expected
        await eventually(lambda: follower.tenants.table.num_keys == len(made), "what was acknowledged")
        assert follower.tenants.of_credential(made[-1].secret).tenant == "acme/search"
        event.remove(engine, "begin", is_full)
        event.listen(engine, "begin", lambda one: one.exec_driver_sql("PRAGMA max_page_count = 1000000"))
        made.append(await make_key(world))
        assert await key_ids(world) == {one.key.id for one in made}


def renew_connections(database: Database) -> None:
    """Let nothing be read by connections that are open now, which remember pages. (Disposing of the pool would forget
    the ones that are in use, unclosed.)"""
    engine = database.engine.sync_engine
    event.listen(engine, "connect", lambda _, record: record.info.update(is_new=True))

    @event.listens_for(engine, "checkout")
    def check(_connection: object, record: Any, _proxy: object) -> None:
        if not record.info.get("is_new"):
            raise sqlalchemy.exc.DisconnectionError


async def test_a_damaged_database_is_said_to_be_and_tables_stay(tmp_path: Path) -> None:
    """Edges and routers must not take a table from it that lacks what cannot be read."""
    path = tmp_path / "control.db"
    async with control_world(f"sqlite:///{path}") as world, follower_of(world, tmp_path) as follower:
        made = [await make_key(world) for _ in range(20)]
        await eventually(lambda: follower.tenants.table.num_keys == len(made), "the keys")
        with contextlib.closing(sqlite3.connect(path)) as other:
            other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            (size,) = other.execute("PRAGMA page_size").fetchone()
        renew_connections(world.database)
        content = path.read_bytes()
        path.write_bytes(content[:size] + hashlib.shake_128(b"damage").digest(len(content) - size))
        for message in (await refused(world), await refused(world, "ListKeys", page_size=1)):
            assert message == "The database of tenants is damaged: restore a backup."
        world.versions.notify()
        await eventually(lambda: not follower.tenants.connected, "the end of the stream")
        assert all(follower.tenants.of_credential(one.secret) for one in made)
        assert follower.tenants.table.num_keys == len(made)
