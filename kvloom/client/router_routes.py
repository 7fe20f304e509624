"""Chooses the router that an answer of `Generate` asks next."""

from __future__ import annotations

import contextlib
from typing import Any, Final
from urllib.parse import unquote

import grpc

from kvloom.client.migrating_generation import MigratingGeneration
from kvloom.client.router_channels import RouterChannels
from kvloom.router_link.cancel_notifier import CancelNotifier
from kvloom.v1.router_service_pb2 import CancelRequest
from kvloom.v1.router_service_pb2_grpc import RouterServiceStub

ADDRESS_KEY: Final = "kvloom-router-address"
"""In the initial metadata of a resumable Generate: the address at which only this router listens, percent-encoded."""
CONTINUES_KEY: Final = "kvloom-goes-on"
"""In the initial metadata of a Generate: the router supports `partial_choices`. One that does not would generate the
answer again from its beginning."""
CANCEL_TIMEOUT_SECONDS: Final = 2.0


class RouterRoutes:
    """The routes of one answer to the routers, and in particular to its owner, the router that has the answer. Where
    several routers share an address, a new connection to it may reach another one than the owner."""

    def __init__(self, routers: RouterChannels, cancel_notifier: CancelNotifier) -> None:
        self._routers = routers
        self._cancel_notifier = cancel_notifier
        self._stubs = routers.stubs
        self._next = 0
        self._channels: list[grpc.aio.Channel] = []
        self.stub = self._stubs[0]
        """The router to call next."""
        self.is_at_owner = False
        """`stub` calls the owner at the address that no other router shares."""
        self._owner_address = ""
        """The address of the router that has the current request; "" if it is not known."""

    @property
    def num_routers(self) -> int:
        return len(self._stubs)

    def note_owner(self, metadata: Any) -> None:
        """Take the owner's address from a call's initial metadata."""
        address = next((unquote(str(value)) for key, value in metadata or () if key == ADDRESS_KEY), "")
        self._owner_address = address or self._owner_address

    def note_heard(self) -> None:
        """The router of `stub` has responded: call it first in future."""
        if not self.is_at_owner:
            self._routers.prefer(self.stub)

    def to_owner(self) -> bool:
        """Call the owner next. Returns False if it was called already, or its address is not known."""
        if not self._owner_address or self.is_at_owner:
            return False
        self._channels.append(self._routers.open_channel(self._owner_address))
        self.stub = RouterServiceStub(self._channels[-1])
        self.is_at_owner = True
        return True

    def to_next(self) -> None:
        """Call another router next, if there is one, with a new request."""
        self.is_at_owner = False
        self._owner_address = ""
        self._next = (self._next + 1) % len(self._stubs)
        self.stub = self._stubs[self._next]

    def give_up(self, settlement: CancelRequest) -> None:
        """Abandon the current request; its router will be notified."""
        self._cancel_notifier.add(self._owner_address or self._routers.address_of(self.stub), settlement)

    async def cancel(self, answer: MigratingGeneration) -> None:
        """Cancel a resumable answer, which would otherwise run on for the router's grace period."""
        if answer.current_request.resumable or answer.last_event:
            with contextlib.suppress(grpc.aio.AioRpcError):
                request = CancelRequest(request_id=answer.current_request.request_id)
                await self.stub.Cancel(request, timeout=CANCEL_TIMEOUT_SECONDS)

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()
