"""A control service with a real database and a real gRPC server, in the test's process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from control.directory.quotas import Quotas
from control.replication.versions import Versions
from control.service.control_servicer import ControlServicer
from control.service.directory_servicer import DirectoryServicer
from control.usage.servicer import UsageServicer
from kvloom.transport.grpc_errors import error_from_peer
from kvloom.v1 import (
    control_service_pb2_grpc,
    directory_service_pb2,
    directory_service_pb2_grpc,
    usage_service_pb2_grpc,
)
from kvloom.v1.control_service_pb2 import FollowRequest
from kvloom_common.database.database import Database
from kvloom_common.tenancy.sliced_dict import NUM_SLICES
from kvloom_common.tenancy.table import Key, Organisation, Tenant, TenantTable
from kvloom_common.transport.checked_server import CheckedServer
from kvloom_common.trust.fabric_trust import NO_SECRET, FabricTrust
from tests.fakes.migrated_database import control_database

Pb = directory_service_pb2
"""The messages of DirectoryService."""


class ControlWorld:
    """`now` is the time of the directory, in seconds since 1970."""

    def __init__(self, database: Database, versions: Versions, channel: grpc.aio.Channel, port: int) -> None:
        self.database = database
        self.versions = versions
        self.channel = channel
        self.port = port
        self.control = control_service_pb2_grpc.ControlServiceStub(channel)
        self.usage = usage_service_pb2_grpc.UsageServiceStub(channel)
        self._directory: Any = directory_service_pb2_grpc.DirectoryServiceStub(channel)
        self.now = 4_000_000_000.0  # in the future: what expires by it is replicated, which the real time decides

    async def ask(self, method: str, *, as_admin_of: str | None = None, actor: str = "test", **fields: Any) -> Any:
        """Call a method of DirectoryService, as an administrator of an organisation or as the operator. Raises
        KvloomError."""
        metadata = [("kvloom-actor", actor)]
        if as_admin_of is not None:
            metadata.append(("kvloom-actor-organisation", as_admin_of))
        request = getattr(directory_service_pb2, f"{method}Request")(**fields)
        try:
            return await getattr(self._directory, method)(request, metadata=metadata, timeout=10.0)
        except grpc.aio.AioRpcError as error:
            raise error_from_peer(error) or error from None

    async def table(self) -> TenantTable:
        """A copy of the whole table, made afresh."""
        table = TenantTable()
        call = self.control.Follow(FollowRequest())
        async for response in call:
            table.apply(response)
            if response.is_complete:
                break
        call.cancel()
        return table


def entries_of(table: TenantTable) -> list[Organisation | Tenant | Key]:
    """All entries of a table."""
    kinds = (table._organisations, table._tenants, table._keys)
    return [entry for kind in kinds for number in range(NUM_SLICES) for entry in kind.values_of(number)]


@contextlib.asynccontextmanager
async def control_world(
    database_url: str,
    trust: FabricTrust = NO_SECRET,
    quotas: Quotas = Quotas(),  # noqa: B008
) -> AsyncIterator[ControlWorld]:
    """An empty one; `database_url` and `quotas` are those of the configuration."""
    async with control_database(database_url) as database:
        versions = Versions(database)
        server = grpc.aio.server()
        checked = CheckedServer(server)
        clock: Callable[[], float] = lambda: world.now  # noqa: E731
        control_service_pb2_grpc.add_ControlServiceServicer_to_server(ControlServicer(database, versions), checked)
        directory_service_pb2_grpc.add_DirectoryServiceServicer_to_server(
            DirectoryServicer(database, versions, clock, quotas), checked
        )
        usage_service_pb2_grpc.add_UsageServiceServicer_to_server(UsageServicer(database), checked)
        port = trust.add_port(server, "127.0.0.1:0")
        await server.start()
        async with trust.open_channel(f"127.0.0.1:{port}", "control") as channel:
            world = ControlWorld(database, versions, channel, port)
            try:
                yield world
            finally:
                versions.close()
                await server.stop(None)
