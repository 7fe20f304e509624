"""The owner of the table of tenants, over real gRPC: it keeps the table in memory, and sends it and its changes."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import grpc

from kvloom.v1 import control_service_pb2_grpc
from kvloom.v1.control_service_pb2 import (
    FollowRequest,
    FollowResponse,
    ReportKeyUsesRequest,
    ReportKeyUsesResponse,
)
from kvloom_common.tenancy.table import Key, Organisation, Tenant
from kvloom_common.trust.fabric_trust import NO_SECRET, FabricTrust
from tests.fakes.tenant_entries import key_to_proto, organisation_to_proto, tenant_to_proto


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class FakeControl(control_service_pb2_grpc.ControlServiceServicer):
    """`table_id` stays the same when it stops and starts again."""

    def __init__(self, table_id: str = "table", trust: FabricTrust = NO_SECRET) -> None:
        self.table_id = table_id
        self.version = 0
        self.address = ""
        self.requests: list[FollowRequest] = []
        self.uses: dict[str, float] = {}
        self.part_entries = 1000
        self.fault: grpc.StatusCode | None = None
        """How each stream ends that is opened, before anything is sent."""
        self.oldest_version = 0
        """Changes after it are known; others need a snapshot."""
        self.may_send = asyncio.Event()
        """Cleared: the service accepts followers, and sends them nothing."""
        self.may_send.set()
        self._trust = trust
        self._entries: dict[tuple[str, str], Any] = {}
        self._changes: list[FollowResponse] = []
        self._changed = asyncio.Event()
        self._server: grpc.aio.Server | None = None

    async def start(self, port: int = 0) -> int:
        self._server = grpc.aio.server()
        control_service_pb2_grpc.add_ControlServiceServicer_to_server(self, self._server)
        port = self._trust.add_port(self._server, f"127.0.0.1:{port}")
        self.address = f"127.0.0.1:{port}"
        await self._server.start()
        return port

    async def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)

    # -- the table ----------------------------------------------------------------------------------------------------

    def put(self, *entries: Organisation | Tenant | Key) -> None:
        change = FollowResponse()
        for entry in entries:
            if isinstance(entry, Organisation):
                field, message = "organisations", organisation_to_proto(entry)
            elif isinstance(entry, Tenant):
                field, message = "tenants", tenant_to_proto(entry)
            else:
                field, message = "keys", key_to_proto(entry)
            self._entries[field, entry.id] = message
            getattr(change, field).append(message)
        self._publish(change)

    def remove_key(self, key_id: str) -> None:
        del self._entries["keys", key_id]
        self._publish(FollowResponse(removed_keys=[key_id]))

    def forget_changes(self) -> None:
        """From now on followers that are not up to date need a snapshot."""
        self.oldest_version = self.version

    def _publish(self, change: FollowResponse) -> None:
        self.version += 1
        change.table_id, change.version, change.is_complete = self.table_id, self.version, True
        self._changes.append(change)
        self._changed.set()
        self._changed = asyncio.Event()

    # -- ControlService -----------------------------------------------------------------------------------------------

    async def Follow(self, request: FollowRequest, context: Any) -> None:
        self.requests.append(request)
        await context.send_initial_metadata(())
        if self.fault is not None:
            await context.abort(self.fault, "")
        await self.may_send.wait()
        sent = request.version
        if request.table_id != self.table_id or not self.oldest_version <= sent <= self.version:
            sent = self.version
            for part in self._snapshot():
                await context.write(part)
        elif sent == self.version:
            await context.write(FollowResponse(table_id=self.table_id, version=sent, is_complete=True))
        while True:
            changed = self._changed
            for change in [change for change in self._changes if change.version > sent]:
                await context.write(change)
                sent = change.version
            if sent == self.version:
                await changed.wait()

    async def ReportKeyUses(self, request: ReportKeyUsesRequest, context: Any) -> ReportKeyUsesResponse:
        self.uses |= {use.key_id: use.at for use in request.uses}
        return ReportKeyUsesResponse()

    def _snapshot(self) -> list[FollowResponse]:
        entries = list(self._entries.items())
        parts = [FollowResponse(begins_snapshot=True)]
        for first in range(0, len(entries), self.part_entries):
            part = FollowResponse()
            for (field, _), message in entries[first : first + self.part_entries]:
                getattr(part, field).append(message)
            parts.append(part)
        for part in parts:
            part.table_id, part.version = self.table_id, self.version
        parts[-1].is_complete = True
        return parts


ACME = Organisation("acme")
SEARCH = Tenant("acme/search")
MAPS = Tenant("acme/maps")
OTHER = Organisation("other")
OTHER_APP = Tenant("other/app")
SEARCH_KEY, SEARCH_KEY_2, MAPS_KEY, OTHER_KEY = "kvl-search", "kvl-search-2", "kvl-maps", "kvl-other"


def key_of(key: str, tenant: str, key_id: str = "", **fields: Any) -> Key:
    return Key(key_id or f"id-{key}", digest_of(key), tenant, **{"scopes": ("inference", "usage"), **fields})


def two_organisations() -> list[Organisation | Tenant | Key]:
    """Three tenants with a key each; the first has two."""
    return [
        *(ACME, OTHER, SEARCH, MAPS, OTHER_APP),
        key_of(SEARCH_KEY, "acme/search"),
        key_of(SEARCH_KEY_2, "acme/search"),
        key_of(MAPS_KEY, "acme/maps"),
        key_of(OTHER_KEY, "other/app"),
    ]
