"""Single calls to one of several routers: the next one is asked when one cannot be reached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import grpc

from kvloom.errors import KvloomError
from kvloom.transport.channel_options import CHANNEL_OPTIONS
from kvloom.transport.grpc_errors import from_rpc_error, told_error
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.router_service_pb2_grpc import RouterServiceStub

_Answer = TypeVar("_Answer")

ASK_ELSEWHERE: Final = frozenset({ErrorReason.ERROR_REASON_DRAINING, ErrorReason.ERROR_REASON_NOT_FOUND})
"""A router that stops; a request that another router knows."""


def may_be_elsewhere(error: grpc.aio.AioRpcError) -> bool:
    """Another router may answer the same call."""
    told = told_error(error)
    return error.code() == grpc.StatusCode.UNAVAILABLE if told is None else told.reason in ASK_ELSEWHERE


class RouterChannels:
    """A channel to each address. The router that answered last is asked first."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = addresses
        self._channels = [grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) for address in addresses]
        self._stubs = [RouterServiceStub(channel) for channel in self._channels]
        self._addresses = dict(zip(self._stubs, addresses, strict=True))

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    @property
    def stubs(self) -> list[RouterServiceStub]:
        """In the order in which they should be asked."""
        return list(self._stubs)

    def address_of(self, stub: RouterServiceStub) -> str:
        return self._addresses[stub]

    def prefer(self, stub: RouterServiceStub) -> None:
        """It has answered."""
        if stub is not self._stubs[0]:
            self._stubs.remove(stub)
            self._stubs.insert(0, stub)

    async def call(
        self,
        call: Callable[[RouterServiceStub], grpc.aio.UnaryUnaryCall[object, _Answer]],
        knows: Callable[[_Answer], bool] = lambda _answer: True,
    ) -> _Answer:
        """What the first router says that `knows`, else what the last one said. Raises KvloomError."""
        answers: list[_Answer] = []
        failure = KvloomError(ErrorReason.ERROR_REASON_ROUTER_LOST, "No router is named.")
        for stub in self.stubs:
            try:
                answer = await call(stub)
            except grpc.aio.AioRpcError as error:
                if not may_be_elsewhere(error):
                    raise from_rpc_error(error) from error
                if told_error(error) is not None or failure.reason == ErrorReason.ERROR_REASON_ROUTER_LOST:
                    failure = from_rpc_error(error)  # what a router says tells more than that another is not there
                continue
            if knows(answer):
                self.prefer(stub)
                return answer
            answers.append(answer)
        if answers:
            return answers[-1]
        raise failure
