"""The ways by which one answer of `Generate` reaches routers."""

from __future__ import annotations

import contextlib
from typing import Any, Final
from urllib.parse import unquote

import grpc

from kvloom.client.migrating_generation import MigratingGeneration
from kvloom.client.router_channels import RouterChannels
from kvloom.router_link.cancel_notifier import CancelNotifier
from kvloom.transport.channel_options import CHANNEL_OPTIONS
from kvloom.v1.router_service_pb2 import CancelRequest
from kvloom.v1.router_service_pb2_grpc import RouterServiceStub

ADDRESS_KEY: Final = "kvloom-router-address"
"""In the initial metadata of a resumable Generate: where the router listens that nobody else does. Percent-encoded."""
CANCEL_TIMEOUT_SECONDS: Final = 2.0


class RouterRoutes:
    """To the routers, and in particular to the one that has the answer: where several share an address, a new
    connection may end at another one."""

    def __init__(self, routers: RouterChannels, lost: CancelNotifier) -> None:
        self._routers = routers
        self._lost = lost
        self._stubs = routers.stubs
        self._next = 0
        self._channels: list[grpc.aio.Channel] = []
        self.stub = self._stubs[0]
        """To be asked next."""
        self.is_at_owner = False
        """It is the way to one router only."""
        self._owner_address = ""
        """Of the router that has the attempt at hand, as far as it is known."""

    @property
    def num_routers(self) -> int:
        return len(self._stubs)

    def note_owner(self, metadata: Any) -> None:
        address = next((unquote(str(value)) for key, value in metadata or () if key == ADDRESS_KEY), "")
        self._owner_address = address or self._owner_address

    def note_heard(self) -> None:
        if not self.is_at_owner:
            self._routers.prefer(self.stub)

    def to_owner(self) -> bool:
        """False: it has been asked, or is not known."""
        if not self._owner_address or self.is_at_owner:
            return False
        self._channels.append(grpc.aio.insecure_channel(self._owner_address, options=CHANNEL_OPTIONS))
        self.stub = RouterServiceStub(self._channels[-1])
        self.is_at_owner = True
        return True

    def to_next(self) -> None:
        """Another router, if there is one, for another attempt."""
        self.is_at_owner = False
        self._owner_address = ""
        self._next = (self._next + 1) % len(self._stubs)
        self.stub = self._stubs[self._next]

    def give_up(self, settlement: CancelRequest) -> None:
        """The router that has the attempt at hand will hear of it."""
        self._lost.add(self._owner_address or self._routers.address_of(self.stub), settlement)

    async def leave(self, answer: MigratingGeneration) -> None:
        """Nobody will come back for it: it need not go on for the grace period."""
        if answer.attempt.resumable or answer.last_event:
            with contextlib.suppress(grpc.aio.AioRpcError):
                request = CancelRequest(request_id=answer.attempt.request_id)
                await self.stub.Cancel(request, timeout=CANCEL_TIMEOUT_SECONDS)

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()
