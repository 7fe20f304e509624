"""How much of the directory an organisation may take."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from control.database.schema import keys
from control.directory import quotas as all_quotas
from control.directory.quotas import Quotas
from kvloom.enums import ErrorReason
from kvloom.errors import KvloomError
from tests.fakes.control_world import ControlWorld, Pb, control_world

SMALL = Quotas(max_keys=3, max_projects=2, max_users=2, max_entry_bytes=7_500)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[ControlWorld]:
    async with small_world(f"sqlite:///{tmp_path}/control.db") as world:
        yield world


@contextlib.asynccontextmanager
async def small_world(database_url: str) -> AsyncIterator[ControlWorld]:
    async with control_world(database_url, quotas=SMALL) as world:
        await world.ask("CreateProject", project=Pb.Project(id="acme/search"), create_organisation=True)
        yield world


async def refused(world: ControlWorld, method: str, **fields: Any) -> KvloomError:
    """Nothing of what is refused is kept."""
    version = (await world.table()).version
    with pytest.raises(KvloomError) as info:
        await world.ask(method, as_admin_of="acme", **fields)
    assert (await world.table()).version == version
    return info.value


def a_key(**fields: Any) -> dict[str, Any]:
    return {"key": Pb.ApiKey(project="acme/search", **fields)}


async def test_keys_are_counted_while_they_can_be_used(world: ControlWorld) -> None:
    """An administrator filled the memory of all edges and routers."""
    made = [await world.ask("CreateKey", as_admin_of="acme", **a_key(name=str(number))) for number in range(3)]
    error = await refused(world, "CreateKey", **a_key())
    assert (error.reason, error.limit) == (ErrorReason.BUDGET_EXHAUSTED, "org:acme max_keys")
    assert error.message == (
        "The organisation 'acme' may have 3 keys, and would have 4. The operator may raise its quota max_keys."
    )
    assert (await refused(world, "RotateKey", id=made[0].key.id, grace_seconds=60.0)).limit == "org:acme max_keys"
    await world.ask("RotateKey", as_admin_of="acme", id=made[0].key.id)
    await world.ask("RevokeKey", as_admin_of="acme", id=made[1].key.id)
    await world.ask("CreateKey", as_admin_of="acme", **a_key(expires_at=world.now + 9.0))
    await refused(world, "CreateKey", **a_key())
    world.now += 10_000.0  # it has expired over an hour ago
    await world.ask("CreateKey", as_admin_of="acme", **a_key())
    await refused(world, "CreateKey", **a_key())
    await world.ask("CreateKey", key=Pb.ApiKey(project="other/search"), create_project=True)  # its quota is its own


async def test_identities_count_also_once_they_are_revoked(world: ControlWorld) -> None:
    """The entry of an identity is what ends it, so it is kept, everywhere."""
    for number in range(3):
        await world.ask("CreateKey", as_admin_of="acme", **a_key(id=f"oidc:login:{number}"))
        await world.ask("RevokeKey", as_admin_of="acme", id=f"oidc:login:{number}@acme/search")
    assert (await refused(world, "CreateKey", **a_key(id="oidc:login:3"))).limit == "org:acme max_keys"


async def test_projects_and_users_are_counted(world: ControlWorld) -> None:
    """Each project is an entry of the table, and each user one of lists and the audit."""
    await world.ask("CreateProject", as_admin_of="acme", project=Pb.Project(id="acme/chat"))
    error = await refused(world, "CreateProject", project=Pb.Project(id="acme/more"))
    assert error.limit == "org:acme max_projects"
    role = Pb.Membership(organisation="acme", role="member")
    for name in ("acme/ada", "acme/bob"):
        await world.ask("CreateUser", as_admin_of="acme", user=Pb.User(id=name, memberships=[role]))
    error = await refused(world, "CreateUser", user=Pb.User(id="acme/cleo", memberships=[role]))
    assert error.limit == "org:acme max_users"
    await world.ask("CreateUser", user=Pb.User(id="cleo"))
    with pytest.raises(KvloomError, match="quota max_users"):
        await world.ask("SetMembership", user="cleo", membership=role)
    await world.ask("DeleteMembership", as_admin_of="acme", user="acme/bob", organisation="acme")
    with pytest.raises(KvloomError, match="quota max_users"):  # there still is one who has no role
        await world.ask("CreateUser", as_admin_of="acme", user=Pb.User(id="acme/cleo", memberships=[role]))
    reader = Pb.Membership(organisation="acme", role="reader")
    await world.ask("SetMembership", as_admin_of="acme", user="acme/ada", membership=reader)  # no other one


async def test_the_bytes_of_entries_are_counted(database_url: str) -> None:
    """Few keys with long lists of models are as large as many."""
    async with small_world(database_url) as world:
        await count_bytes(world)


async def count_bytes(world: ControlWorld) -> None:
    long = [f"{number:03}" + "\N{PILE OF POO}" * 200 for number in range(9)]
    made = await world.ask("CreateKey", as_admin_of="acme", **a_key())
    mask = {"update_mask": {"paths": ["models"]}}
    error = await refused(world, "UpdateKey", key=Pb.ApiKey(id=made.key.id, models=long), **mask)
    assert (error.reason, error.limit) == (ErrorReason.BUDGET_EXHAUSTED, "org:acme max_entry_bytes")
    error = await refused(world, "UpdateProject", project=Pb.Project(id="acme/search", models=long), **mask)
    assert error.limit == "org:acme max_entry_bytes"
    await world.ask("UpdateKey", as_admin_of="acme", key=Pb.ApiKey(id=made.key.id, models=long[:8]), **mask)
    error = await refused(world, "CreateKey", **a_key(models=long[:2]))
    assert error.limit == "org:acme max_entry_bytes"
    # What is smaller, ends something, or changes no text is never refused.
    quotas = {"paths": ["quotas"]}
    small = Pb.Organisation(id="acme", quotas=Pb.Quotas(max_entry_bytes=1))
    await world.ask("UpdateOrganisation", organisation=small, update_mask=quotas)
    await world.ask("UpdateKey", as_admin_of="acme", key=Pb.ApiKey(id=made.key.id, models=long[:7]), **mask)
    await world.ask("RevokeKey", as_admin_of="acme", id=made.key.id)


async def test_an_entry_has_a_largest_size(world: ControlWorld) -> None:
    """256 models of 256 four-byte characters are a key of 262 kB."""
    huge = [f"{number:03}" + "\N{PILE OF POO}" * 253 for number in range(256)]
    error = await refused(world, "CreateKey", **a_key(models=huge))
    assert (error.reason, error.field) == (ErrorReason.INVALID_ARGUMENT, "key.models")
    project = {"project": Pb.Project(id="acme/search", models=huge), "update_mask": {"paths": ["models"]}}
    assert (await refused(world, "UpdateProject", **project)).field == "project.models"
    paths = {"update_mask": {"paths": ["name"] * 10_000}}
    made = await world.ask("CreateKey", as_admin_of="acme", **a_key())
    assert (await refused(world, "UpdateKey", key=Pb.ApiKey(id=made.key.id), **paths)).field == "update_mask"


async def test_the_operator_gives_an_organisation_quotas_of_its_own(world: ControlWorld) -> None:
    """One large customer is no reason to raise the quota of all."""
    mask = {"update_mask": {"paths": ["quotas"]}}
    more = Pb.Organisation(id="acme", quotas=Pb.Quotas(max_keys=5))
    with pytest.raises(KvloomError, match="Only the operator"):
        await world.ask("UpdateOrganisation", as_admin_of="acme", organisation=more, **mask)
    shown = (await world.ask("UpdateOrganisation", organisation=more, **mask)).organisation.quotas
    assert (shown.max_keys, shown.max_projects) == (5, 0)
    for _ in range(5):
        await world.ask("CreateKey", as_admin_of="acme", **a_key())
    assert (await refused(world, "CreateKey", **a_key())).limit == "org:acme max_keys"
    await world.ask("UpdateOrganisation", organisation=Pb.Organisation(id="acme"), **mask)
    assert "may have 3 keys" in (await refused(world, "CreateKey", **a_key())).message


async def test_what_has_ended_does_not_fill_the_database(world: ControlWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that are made and revoked again and again would; so would projects."""
    monkeypatch.setattr(all_quotas, "KEPT_TIMES", 2)
    made = []
    for _ in range(10):
        world.now += 1.0
        made.append((await world.ask("CreateKey", as_admin_of="acme", **a_key())).key.id)
        await world.ask("RevokeKey", as_admin_of="acme", id=made[-1])
    await world.ask("CreateKey", as_admin_of="acme", **a_key(id="oidc:login:ada"))
    async with world.database.reading() as connection:
        there = set(await connection.scalars(sa.select(keys.c.id)))
    assert there == {*made[-6:], "oidc:login:ada@acme/search"}
    for number in range(4):
        await world.ask("CreateProject", as_admin_of="acme", project=Pb.Project(id=f"acme/p{number}"))
        await world.ask("DeleteProject", as_admin_of="acme", id=f"acme/p{number}")
    await world.ask("CreateProject", as_admin_of="acme", project=Pb.Project(id="acme/p4"))
    await world.ask("DeleteProject", as_admin_of="acme", id="acme/p4")
    error = await refused(world, "CreateProject", project=Pb.Project(id="acme/p5"))
    assert "with those that were deleted" in error.message
