"""A follower's table is that of the database, whatever changes and whenever it loses its stream."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from typing import Any

import sqlalchemy as sa
from google.protobuf.field_mask_pb2 import FieldMask
from hypothesis import given, settings
from hypothesis import strategies as st

from control.database.schema import changes, table_state
from control.directory.actor import Actor
from control.directory.methods import READS, WRITES
from control.directory.quotas import Quotas
from control.directory.transaction import changing
from control.replication.follower import Follower
from control.replication.versions import Versions
from kvloom.errors import KvloomError
from kvloom.v1 import directory_service_pb2 as pb
from kvloom.v1.control_service_pb2 import Limits, Price
from kvloom_common.database.database import Database
from kvloom_common.tenancy.table import TenantTable
from tests.examples import num_examples
from tests.fakes.migrated_database import control_database

OPERATOR = Actor("test")
ORGANISATIONS = ("a", "b")
PROJECTS = ("a/x", "a/y", "b/x")
USERS = ("u", "v")
TIERS = ("", "t")

organisation, project, user, tier = (st.sampled_from(names) for names in (ORGANISATIONS, PROJECTS, USERS, TIERS))
limits = st.builds(Limits, requests_per_minute=st.integers(0, 3))
disabled = FieldMask(paths=["disabled", "tier"])
role = st.sampled_from(["reader", "member", "admin"])
memberships = st.builds(pb.Membership, organisation=organisation, role=role)
keys = st.builds(pb.ApiKey, project=project, user=st.sampled_from(["", *USERS]), tier=tier, limits=limits)

writes = st.one_of(
    st.builds(pb.CreateProjectRequest, project=st.builds(pb.Project, id=project), create_organisation=st.just(True)),
    st.builds(
        pb.UpdateOrganisationRequest,
        organisation=st.builds(pb.Organisation, id=organisation, tier=tier, disabled=st.booleans()),
        update_mask=st.just(disabled),
    ),
    st.builds(pb.DeleteProjectRequest, id=project),
    st.builds(pb.DeleteOrganisationRequest, id=organisation),
    st.builds(pb.CreateUserRequest, user=st.builds(pb.User, id=user)),
    st.builds(
        pb.UpdateUserRequest,
        user=st.builds(pb.User, id=user, disabled=st.booleans()),
        update_mask=st.just(FieldMask(paths=["disabled"])),
    ),
    st.builds(pb.DeleteUserRequest, id=user),
    st.builds(pb.SetMembershipRequest, user=user, membership=memberships),
    st.builds(pb.DeleteMembershipRequest, user=user, organisation=organisation),
    st.builds(pb.CreateKeyRequest, key=keys, create_project=st.booleans()),
    st.builds(pb.SetLimitTierRequest, tier=st.builds(pb.LimitTier, name=st.just("t"), limits=limits)),
    st.builds(pb.DeleteLimitTierRequest, name=st.just("t")),
    st.builds(
        pb.CreatePriceRequest,
        price=st.builds(Price, model=st.just("*"), effective_from=st.integers(0, 9).map(float)),
    ),
)
steps = st.one_of(
    writes,
    writes,
    st.sampled_from(["revoke a key", "rotate a key", "forget the log"]),
    st.tuples(st.just("read"), st.integers(1, 4)),
    st.just("disconnect"),
)


class Rig:
    """A database, and one follower that reads only when it is told to."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._versions = Versions(database)
        self.table = TenantTable()
        self._known = ("", 0)
        """What the follower has as a whole."""
        self._responses: Any = None

    async def write(self, request: Any) -> None:
        """Changes that are refused (there may be no such project) are part of the game."""
        method = type(request).__name__.removesuffix("Request")
        with contextlib.suppress(KvloomError):
            async with changing(self._database, OPERATOR, method, 10.0, Quotas()) as change:
                await WRITES[method](change, request)
        self._versions.notify()

    async def step(self, step: Any) -> None:
        if step == "disconnect":
            await self.disconnect()
        elif step == "forget the log":
            async with self._database.writing() as connection:
                await connection.execute(sa.delete(changes))
                await connection.execute(sa.update(table_state).values(oldest_version=table_state.c.version))
        elif isinstance(step, str):
            async with self._database.reading() as connection:
                listed = (await READS["ListKeys"](connection, OPERATOR, pb.ListKeysRequest())).keys
            for key in listed[:1]:
                is_rotation = step == "rotate a key"
                request = pb.RotateKeyRequest(id=key.id, grace_seconds=5.0) if is_rotation else None
                await self.write(request or pb.RevokeKeyRequest(id=key.id))
        elif isinstance(step, tuple):
            for _ in range(step[1]):
                await self.read()
        else:
            await self.write(step)

    async def read(self) -> None:
        """Apply one response, if there is one."""
        if self._responses is None:
            self._responses = Follower(self._database, self._versions, *self._known, part_entries=2).responses()
        if self._known == await self.version():
            return
        response = await anext(self._responses)
        self.table.apply(response)
        self._known = (response.table_id, response.version) if response.is_complete else ("", 0)

    async def disconnect(self) -> None:
        if self._responses is not None:
            await self._responses.aclose()
        self._responses = None

    async def catch_up(self) -> None:
        while self._known != await self.version():
            await self.read()

    async def version(self) -> tuple[str, int]:
        async with self._database.reading() as connection:
            return tuple((await connection.execute(sa.select(table_state.c.table_id, table_state.c.version))).one())

    async def fresh(self) -> TenantTable:
        table = TenantTable()
        responses: Any = Follower(self._database, self._versions, "", 0).responses()
        async for response in responses:
            table.apply(response)
            if response.is_complete:
                break
        await responses.aclose()
        return table


def content(table: TenantTable) -> tuple[Any, ...]:
    return (
        table.table_id,
        table.version,
        table._organisations,
        table._tenants,
        table._keys,
        table._by_digest,
        sorted(table.prices, key=lambda price: price.id),
    )


async def run(url: str, drawn: list[Any]) -> None:
    async with control_database(url) as database:
        rig = Rig(database)
        for step in drawn:
            await rig.step(step)
        await rig.catch_up()
        assert content(rig.table) == content(await rig.fresh())
        await rig.disconnect()


@settings(max_examples=num_examples(60))
@given(st.lists(steps, min_size=5, max_size=40))
def test_a_follower_has_what_the_database_has(drawn: list[Any]) -> None:
    """A revoked key that a follower keeps, or a limit that it misses, stays wrong for ever. The follower reads now and
    then, so that parts of snapshots and changes interleave with further changes."""
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(f"sqlite:///{folder}/control.db", drawn))
