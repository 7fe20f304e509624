"""ControlService.Follow over gRPC, with both kinds of database."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
import sqlalchemy as sa
from sqlalchemy.engine import make_url

from control.database.schema import keys, table_state
from control.directory import transaction
from control.replication.follower import Follower
from kvloom.enums import ErrorReason
from kvloom.transport.grpc_errors import error_from_peer
from kvloom.v1.control_service_pb2 import FollowRequest, LeaseBudgetsRequest, LeaseBudgetsResponse
from kvloom_common.database.database import make_engine, with_driver
from kvloom_common.tenancy.table import EXPIRED_SECONDS, TenantTable
from tests.fakes.control_world import ControlWorld, Pb, control_world


@pytest.fixture
async def world(database_url: str) -> AsyncIterator[ControlWorld]:
    async with control_world(database_url) as world:
        yield world


async def test_changes_reach_a_follower_without_being_asked_for(world: ControlWorld) -> None:
    """A revocation holds everywhere within a second."""
    call = world.control.Follow(FollowRequest())
    table = TenantTable()
    while not table.version:
        table.apply(await call.read())
    made = await world.ask("CreateKey", key=Pb.ApiKey(project="acme/search"), create_project=True)
    while table.key(made.key.id) is None:
        table.apply(await call.read())
    await world.ask("RevokeKey", id=made.key.id)
    while table.key(made.key.id) is not None:
        response = await call.read()
        table.apply(response)
        assert not response.begins_snapshot
    call.cancel()


async def test_a_follower_that_comes_back_gets_only_what_it_has_missed(world: ControlWorld) -> None:
    """After a restart of control, hundreds of processes come back at once."""
    await world.ask("CreateKey", key=Pb.ApiKey(project="acme/search"), create_project=True)
    table = await world.table()
    await world.ask("CreateProject", project=Pb.Project(id="acme/chat"))
    call = world.control.Follow(FollowRequest(table_id=table.table_id, version=table.version))
    response = await call.read()
    call.cancel()
    assert not response.begins_snapshot
    assert [tenant.id for tenant in response.tenants] == ["acme/chat"]
    assert not response.keys


async def test_what_has_long_expired_leaves_the_table_and_stays_in_the_database(world: ControlWorld) -> None:
    """Short-lived keys would fill the memory of every process. The entry of an identity stays: it is what ends it."""
    made = await world.ask("CreateKey", key=Pb.ApiKey(project="acme/search"), create_project=True)
    await world.ask("CreateKey", key=Pb.ApiKey(project="acme/search", id="oidc:login:ada"))
    for seconds, is_kept in ((EXPIRED_SECONDS / 2, True), (2 * EXPIRED_SECONDS, False)):
        async with world.database.writing() as connection:
            await connection.execute(sa.update(keys).values(expires_at=time.time() - seconds))
        table = await world.table()
        assert (table.key(made.key.id) is not None) == is_kept
        assert table.key("oidc:login:ada@acme/search") is not None
    assert len((await world.ask("ListKeys")).keys) == 2


async def test_a_key_that_is_revoked_while_a_snapshot_is_sent_is_told_at_once(world: ControlWorld) -> None:
    """A snapshot of many keys takes long, and the follower serves by its old table until the end of it."""
    made = [
        (await world.ask("CreateKey", key=Pb.ApiKey(project="acme/search"), create_project=True)).key.id
        for _ in range(4)
    ]
    table = TenantTable()
    responses = Follower(world.database, world.versions, "", 0, part_entries=1).responses()
    told: list[str] = []
    async for response in responses:
        table.apply(response)
        if response.holds_at_once:
            assert not response.is_complete
            told += response.removed_keys
        elif response.keys and not told:
            await world.ask("RevokeKey", id=sorted(made)[0])
        if response.is_complete:
            break
    assert told == [sorted(made)[0]]
    assert {one for one in made if table.key(one) is not None} == set(sorted(made)[1:])


@pytest.mark.parametrize("has", ["another database's table", "a version of the future", "a forgotten version"])
async def test_a_follower_whose_version_says_nothing_gets_everything(world: ControlWorld, has: str) -> None:
    """A database that was restored from a backup has other versions than those that followers have seen."""
    await world.ask("CreateKey", key=Pb.ApiKey(project="acme/search"), create_project=True)
    table = await world.table()
    request = FollowRequest(table_id=table.table_id, version=table.version)
    if has == "another database's table":
        request.table_id = "other"
    elif has == "a version of the future":
        request.version += 1
    else:
        async with world.database.writing() as connection:
            await connection.execute(sa.update(table_state).values(version=9, oldest_version=9))
    call = world.control.Follow(request)
    assert (await call.read()).begins_snapshot
    call.cancel()


async def test_a_change_of_very_many_entries_becomes_a_snapshot(
    world: ControlWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tier that a million keys have must not write a million rows into the log."""
    monkeypatch.setattr(transaction, "MAX_CHANGES", 3)
    await world.ask("SetLimitTier", tier=Pb.LimitTier(name="t"))
    for _ in range(5):
        await world.ask("CreateKey", key=Pb.ApiKey(project="acme/search", tier="t"), create_project=True)
    table = await world.table()
    await world.ask("SetLimitTier", tier=Pb.LimitTier(name="t"))
    call = world.control.Follow(FollowRequest(table_id=table.table_id, version=table.version))
    assert (await call.read()).begins_snapshot
    call.cancel()


async def test_routers_that_lease_budgets_do_not_hold_up_a_stop(world: ControlWorld) -> None:
    """Their streams are open for as long as they run: a restart would always take all of its patience."""
    call = world.control.LeaseBudgets()
    await call.write(LeaseBudgetsRequest(producer="r0/1"))
    assert isinstance(await call.read(), LeaseBudgetsResponse)
    world.versions.close()
    with pytest.raises(grpc.aio.AioRpcError) as info:
        async with asyncio.timeout(20.0):
            await call.read()
    error = error_from_peer(info.value)
    assert error is not None
    assert error.reason == ErrorReason.DRAINING


async def test_streams_end_with_a_reason_when_the_service_stops(world: ControlWorld) -> None:
    """Followers then look for its successor."""
    call = world.control.Follow(FollowRequest())
    while not (await call.read()).is_complete:
        pass
    world.versions.close()
    with pytest.raises(grpc.aio.AioRpcError) as info:
        await call.read()
    error = error_from_peer(info.value)
    assert error is not None
    assert error.reason == ErrorReason.DRAINING


@pytest.mark.postgres
async def test_changes_by_another_process_reach_followers(postgres_url: str) -> None:
    """Several services may share a PostgreSQL database, each with followers of its own."""
    async with control_world(postgres_url) as ours, control_world(postgres_url) as theirs:
        polling = asyncio.create_task(ours.versions.run())
        call = ours.control.Follow(FollowRequest())
        table = TenantTable()
        while not table.version:
            table.apply(await call.read())
        await theirs.ask("CreateProject", project=Pb.Project(id="acme/search"), create_organisation=True)
        while table.tenant("acme/search") is None:
            table.apply(await call.read())
        call.cancel()
        polling.cancel()
        await asyncio.gather(polling, return_exceptions=True)


@pytest.mark.postgres
async def test_changes_at_several_services_take_turns(postgres_url: str) -> None:
    """Each version is that of one change, and followers miss none."""
    async with control_world(postgres_url) as ours, control_world(postgres_url) as theirs:
        before = (await ours.table()).version
        names = [f"org-{number}" for number in range(20)]
        await asyncio.gather(
            *(
                (ours, theirs)[number % 2].ask("CreateOrganisation", organisation=Pb.Organisation(id=name))
                for number, name in enumerate(names)
            )
        )
        table = await theirs.table()
        assert table.version == before + len(names)
        assert all(table.organisation(name) for name in names)


async def test_a_database_that_is_gone_is_an_error_and_not_the_end(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Control must outlive a failure of its database, and say so to those who ask meanwhile."""
    path = tmp_path_factory.mktemp("control") / "control.db"
    async with control_world(f"sqlite:///{path}") as world:
        engine = make_engine(with_driver(make_url(f"sqlite:///{path}")))
        async with engine.begin() as connection:
            await connection.execute(sa.text("ALTER TABLE organisations RENAME TO hidden"))
        with pytest.raises(Exception, match="CONTROL_UNAVAILABLE"):
            await world.ask("ListOrganisations")
        async with engine.begin() as connection:
            await connection.execute(sa.text("ALTER TABLE hidden RENAME TO organisations"))
        await engine.dispose()
        assert not (await world.ask("ListOrganisations")).organisations
