"""How a control service hears of changes that another one has made in the same PostgreSQL database."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import sqlalchemy as sa
from sqlalchemy import event

from control.database.schema import table_state
from control.replication.versions import Versions
from kvloom.v1 import directory_service_pb2
from tests.fakes.control_world import ControlWorld, control_world

pytestmark = pytest.mark.postgres
NEVER_SECONDS = 3600.0
TIMEOUT_SECONDS = 20.0


@pytest.fixture
async def world(postgres_url: str) -> AsyncIterator[ControlWorld]:
    """The service that makes changes."""
    async with control_world(postgres_url) as world:
        yield world


@contextlib.asynccontextmanager
async def other_service(url: str, check_seconds: float) -> AsyncIterator[tuple[ControlWorld, Versions]]:
    """One that runs beside it, with its own connections, and has begun to listen."""
    async with control_world(url) as world:
        versions = Versions(world.database, check_seconds=check_seconds)
        begun = versions.next_change()
        running = asyncio.create_task(versions.run())
        await asyncio.wait_for(begun.wait(), TIMEOUT_SECONDS)
        try:
            yield world, versions
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def change(world: ControlWorld, number: int) -> None:
    await world.ask("CreateOrganisation", organisation=directory_service_pb2.Organisation(id=f"acme-{number}"))


async def heard(versions: Versions, changed: asyncio.Event) -> None:
    """Returns when a follower of the service is told."""
    await asyncio.wait_for(versions.wait(changed), TIMEOUT_SECONDS)


async def test_changes_of_another_service_are_announced(world: ControlWorld, postgres_url: str) -> None:
    """It looked twenty times a second, with 36 transactions, where nothing changed for days."""
    async with other_service(postgres_url, NEVER_SECONDS) as (other, versions):
        statements: list[str] = []
        event.listen(
            other.database.engine.sync_engine,
            "before_cursor_execute",
            lambda _connection, _cursor, statement, *_: statements.append(statement),
        )
        for number in range(3):
            changed = versions.next_change()
            await change(world, number)
            await heard(versions, changed)
        assert statements == []


async def test_a_change_that_is_not_announced_is_found(world: ControlWorld, postgres_url: str) -> None:
    """A pooler may lose announcements, and control of an earlier version makes none: revocations hold all the same."""
    async with other_service(postgres_url, 0.01) as (_, versions):
        changed = versions.next_change()
        waiting = asyncio.create_task(heard(versions, changed))
        async with world.database.writing() as connection:
            await connection.execute(sa.update(table_state).values(version=table_state.c.version + 1))
        await waiting


async def test_a_service_listens_again_after_its_connection_broke(world: ControlWorld, postgres_url: str) -> None:
    """A restart of the database ends all connections."""
    async with other_service(postgres_url, 0.01) as (_, versions):
        again = versions.next_change()
        waiting = asyncio.create_task(heard(versions, again))
        async with world.database.writing() as connection:
            mine = sa.select(sa.func.pg_backend_pid())
            others = sa.text("SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> :mine")
            for (pid,) in (await connection.execute(others, {"mine": await connection.scalar(mine)})).all():
                await connection.execute(sa.select(sa.func.pg_terminate_backend(pid)))
        await waiting
        changed = versions.next_change()
        waiting = asyncio.create_task(heard(versions, changed))
        await change(world, 1)
        await waiting
