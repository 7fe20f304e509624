"""Unary calls to one of several routers. When a router cannot be reached, the next one is called."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import grpc

from kvloom.errors import KvloomError
from kvloom.transport.channel_options import OpenChannel, open_plain_channel
from kvloom.transport.grpc_errors import error_from_peer, from_rpc_error
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.router_service_pb2_grpc import RouterServiceStub

_Answer = TypeVar("_Answer")

ASK_ELSEWHERE: Final = frozenset(
    {
        ErrorReason.ERROR_REASON_DRAINING,
        ErrorReason.ERROR_REASON_NOT_FOUND,
        ErrorReason.ERROR_REASON_CELL_UNAVAILABLE,
    }
)
"""Reasons to call another router: this one is stopping, another one knows the request, or only that of another cell may
compute it."""
FAR_SECONDS: Final = 30.0
"""How long a router of another cell that has answered is called first. Then the near ones are, which may be back."""


class RouterChannels:
    """A channel to each address. The router that answered last is called first."""

    def __init__(
        self,
        addresses: Sequence[str],
        open_channel: OpenChannel = open_plain_channel,
        *,
        far_addresses: Sequence[str] = (),
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`far_addresses` are those of other cells, which are called after the others."""
        self.addresses = addresses
        self.far_addresses = far_addresses
        self.open_channel = open_channel
        every = [*addresses, *far_addresses]
        self._channels = [open_channel(address) for address in every]
        self._stubs = [RouterServiceStub(channel) for channel in self._channels]
        self._addresses = dict(zip(self._stubs, every, strict=True))
        self._far_stubs = frozenset(self._stubs[len(addresses) :])
        self._now = now
        self._returns_at = 0.0
        """When the near routers are called first again; 0: they are."""

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    @property
    def stubs(self) -> list[RouterServiceStub]:
        """The routers' stubs, in the order in which to call them."""
        if self._returns_at and self._now() >= self._returns_at:
            self._returns_at = 0.0
            self._stubs.sort(key=self._far_stubs.__contains__)
        return list(self._stubs)

    def address_of(self, stub: RouterServiceStub) -> str:
        return self._addresses[stub]

    def prefer(self, stub: RouterServiceStub) -> None:
        """Call this router first from now on, because it has answered."""
        if stub is not self._stubs[0]:
            self._stubs.remove(stub)
            self._stubs.insert(0, stub)
            self._returns_at = self._now() + FAR_SECONDS if stub in self._far_stubs else 0.0

    async def call(
        self,
        call: Callable[[RouterServiceStub], grpc.aio.UnaryUnaryCall[object, _Answer]],
        knows: Callable[[_Answer], bool] = lambda _answer: True,
        rank: Callable[[_Answer], int] = lambda _answer: 0,
    ) -> _Answer:
        """The first answer for which `knows` is true, otherwise the one with the highest `rank`. Raises KvloomError
        when no router answers."""
        answers: list[_Answer] = []
        failure = KvloomError(ErrorReason.ERROR_REASON_ROUTER_LOST, "No router address was given.")
        for stub in self.stubs:
            try:
                answer = await call(stub)
            except grpc.aio.AioRpcError as error:
                peer_error = error_from_peer(error)
                is_unreachable = peer_error is None and error.code() == grpc.StatusCode.UNAVAILABLE
                if not is_unreachable and (peer_error is None or peer_error.reason not in ASK_ELSEWHERE):
                    raise from_rpc_error(error) from None
                if peer_error is not None or failure.reason == ErrorReason.ERROR_REASON_ROUTER_LOST:
                    failure = from_rpc_error(error)  # a router's own error says more than that another is unreachable
                continue
            if knows(answer):
                self.prefer(stub)
                return answer
            answers.append(answer)
        if answers:
            return max(answers, key=rank)
        raise failure
