"""The fake owner of the table of tenants, and the real one, are followed alike."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from control.service.control_servicer import ControlServicer
from kvloom.v1 import control_service_pb2_grpc
from kvloom_common.tenancy.table import Tenant
from kvloom_common.transport.checked_server import CheckedServer
from tests.conformance.control_suite import TENANT, ControlSuite, OwnedTable
from tests.fakes.control_world import ControlWorld, control_world
from tests.fakes.fake_control import ACME, SEARCH, FakeControl, key_of

_numbers = itertools.count(1)


class FakeOwner(OwnedTable):
    def __init__(self) -> None:
        self._control = FakeControl()
        self._control.put(ACME, SEARCH)

    async def begin(self) -> None:
        await self._control.start()
        self.address = self._control.address

    async def add_key(self) -> tuple[str, str]:
        key = f"kvl-{next(_numbers)}"
        self._control.put(key_of(key, TENANT))
        return f"id-{key}", key

    async def revoke(self, key_id: str) -> None:
        self._control.remove_key(key_id)

    async def disable_tenant(self) -> None:
        self._control.put(Tenant(TENANT, disabled=True))

    async def stop(self) -> None:
        await self._control.stop()

    async def start_again(self) -> None:
        await self._control.start(int(self.address.rpartition(":")[2]))


class TestFakeControl(ControlSuite):
    @pytest.fixture
    async def owner(self) -> AsyncIterator[OwnedTable]:
        owner = FakeOwner()
        await owner.begin()
        yield owner
        await owner.stop()


class RealOwner(OwnedTable):
    """The directory is asked over a port of its own; the followers have another, which may be closed."""

    def __init__(self, world: ControlWorld) -> None:
        self._world = world
        self._server: grpc.aio.Server | None = None
        self.address = "127.0.0.1:0"

    async def start_again(self) -> None:
        self._server = grpc.aio.server()
        servicer = ControlServicer(self._world.database, self._world.versions)
        control_service_pb2_grpc.add_ControlServiceServicer_to_server(servicer, CheckedServer(self._server))
        port = self._server.add_insecure_port(self.address)
        self.address = f"127.0.0.1:{port}"
        await self._server.start()

    async def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)

    async def add_key(self) -> tuple[str, str]:
        created = await self._world.ask("CreateKey", key={"project": TENANT, "name": "test"})
        return created.key.id, created.secret

    async def revoke(self, key_id: str) -> None:
        await self._world.ask("RevokeKey", id=key_id)

    async def disable_tenant(self) -> None:
        await self._world.ask(
            "UpdateProject", project={"id": TENANT, "disabled": True}, update_mask={"paths": ["disabled"]}
        )


class TestControl(ControlSuite):
    @pytest.fixture
    async def owner(self, tmp_path: Path) -> AsyncIterator[OwnedTable]:
        async with control_world(f"sqlite:///{tmp_path}/control.db") as world:
            await world.ask("CreateOrganisation", organisation={"id": "acme"})
            await world.ask("CreateProject", project={"id": TENANT})
            owner = RealOwner(world)
            await owner.start_again()
            yield owner
            await owner.stop()
