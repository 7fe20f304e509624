"""Limits what one caller, one address and all of them together can make a router hold over gRPC.

gRPC has no limits per caller, and receives a whole message before it calls the method. All methods are therefore served
as streams: a stream is checked when it begins, and its message is received only then.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final

import grpc

from kvloom.errors import KvloomError, request_timeout
from kvloom.transport.grpc_errors import abort
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.callers import Callers
from kvloom_common.config import CallersConfig
from kvloom_common.limits.address_limit import AddressLimit, KeyedCounts
from kvloom_common.limits.byte_budget import ByteBudget, memory_error
from kvloom_common.limits.client_address import Address
from kvloom_common.limits.memory_watch import LARGE_BYTES, MemoryLevel
from kvloom_common.transport.checked_server import malformed_message
from router.caller_scope import caller_name, peer_host, require_one_credential_in, verified_caller
from router.rpc.own_rpcs import Behaviour, Context, is_own
from router.rpc.receipts import Receipts

RECEIVE_SECONDS: Final = 60.0
"""How long a request may take to arrive."""
RETRY_SECONDS: Final = 1.0


class RpcSettings(CallersConfig):
    max_message_bytes: int = 16 * 2**20
    """The size of one gRPC message of a client: four times that of a body at an edge."""
    max_pending_request_bytes: int = 256 * 2**20
    """The size of all requests of clients over gRPC together, from their arrival to their end. Beyond that requests are
    rejected at once."""


class RpcLimits(grpc.aio.ServerInterceptor):
    """gRPC calls it for every RPC that a server receives. It must come after interceptors that log, and before those
    that change what is called."""

    def __init__(self, config: RpcSettings, callers: Callers, trusted_proxies: list[str]) -> None:
        """`trusted_proxies`: networks whose addresses may have any number of connections."""
        self._config = config
        self._callers = callers
        self._num_open = KeyedCounts[str]()
        """RPCs, by caller."""
        self._num_on_connection = KeyedCounts[str]()
        """RPCs, by the peer's address and port."""
        self._addresses = AddressLimit(config.max_connections_per_address, trusted_proxies)
        self._counted: dict[str, Address | None] = {}
        self._receipts = Receipts(max(1, config.max_pending_request_bytes // config.max_message_bytes))
        self.requests = ByteBudget(
            config.max_pending_request_bytes, "requests", least_share_bytes=config.max_message_bytes
        )
        """The bytes of all RPCs that have begun and not ended."""
        self._level = MemoryLevel.NORMAL

    @property
    def num_open(self) -> int:
        return sum(self._num_open.values())

    def on_memory_level(self, level: MemoryLevel) -> None:
        self._level = level
        self.requests.restrict(None if level == MemoryLevel.NORMAL else LARGE_BYTES)
        if level > MemoryLevel.NORMAL:
            self._receipts.end_old(asyncio.get_running_loop().time())

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return handler
        own = is_own(handler_call_details)  # others are served at every level of memory
        if handler.stream_stream is not None:
            limited, parse = self._limited_stream(handler.stream_stream, is_own=own), handler.request_deserializer
        else:
            returns = handler.unary_unary is not None
            behaviour = handler.unary_unary if returns else handler.unary_stream
            limited, parse = self._limited_request(behaviour, is_own=own, returns=returns), None
        return grpc.stream_stream_rpc_method_handler(limited, parse, handler.response_serializer)

    def _limited_stream(self, behaviour: Behaviour, *, is_own: bool) -> Any:
        async def limited(requests: Any, context: Context) -> None:
            try:
                place = self._place(context, is_own=is_own)
            except KvloomError as error:
                await abort(context, error)
            with place:
                await behaviour(requests, context)

        return limited

    def _limited_request(self, behaviour: Behaviour, *, is_own: bool, returns: bool) -> Any:
        """`behaviour` takes one request, as bytes. If it `returns` its response, that is written here."""

        async def limited(_requests: Any, context: Context) -> None:
            try:
                place = self._place(context, is_own=is_own)
            except KvloomError as error:
                await abort(context, error)
            with place as caller, self.requests.lease(caller) as lease:
                try:
                    raw = await self._receive(context, caller)
                    lease.take(len(raw))
                except KvloomError as error:
                    await abort(context, error)
                call = behaviour(raw, context)
                del raw  # the behaviour parses it and lets it go
                response = await call
                if returns:
                    await context.write(response)

        return limited

    def _place(self, context: Context, *, is_own: bool) -> contextlib.AbstractContextManager[str]:
        """A place of the caller, which is free again at the end of the block. Raises KvloomError (OVERLOADED,
        RATE_LIMITED, INVALID_ARGUMENT)."""
        if is_own and self._level >= MemoryLevel.FULL:
            raise memory_error()
        if verified_caller.get() is None:
            require_one_credential_in(context)
        peer = context.peer()
        caller = caller_name(self._callers, context)
        most = self._config.max_concurrent_requests
        if caller and self._num_open[caller] >= most:
            raise _too_many(f"You have {most} RPCs open at this router", "callers.max_concurrent_requests")
        if not self._num_on_connection[peer]:
            try:
                self._counted[peer] = self._addresses.open(peer_host(peer))
            except ValueError:
                most = self._config.max_connections_per_address
                raise _too_many(
                    f"Your address uses {most} connections to this router", "callers.max_connections_per_address"
                ) from None
        self._num_on_connection.add(peer)
        self._num_open.add(caller)
        return self._held(peer, caller)

    @contextlib.contextmanager
    def _held(self, peer: str, caller: str) -> Iterator[str]:
        try:
            yield caller
        finally:
            self._num_open.remove(caller)
            self._num_on_connection.remove(peer)
            if not self._num_on_connection[peer] and (address := self._counted.pop(peer)) is not None:
                self._addresses.close(address)

    async def _receive(self, context: Context, caller: str) -> bytes:
        """The message of a request. Raises KvloomError (OVERLOADED, REQUEST_TIMEOUT, INVALID_ARGUMENT)."""
        loop = asyncio.get_running_loop()
        was_ended = False
        receipt = None
        try:
            async with asyncio.timeout(RECEIVE_SECONDS) as timeout:

                def end() -> None:
                    nonlocal was_ended
                    was_ended = True
                    timeout.reschedule(loop.time())

                receipt = self._receipts.begin(caller, loop.time(), end)
                raw = await context.read()
        except TimeoutError:
            if was_ended:
                raise memory_error() from None
            raise request_timeout(f"The request did not arrive within {RECEIVE_SECONDS:g} s.") from None
        finally:
            if receipt is not None:
                self._receipts.finish(receipt)
        if not isinstance(raw, bytes):  # the end of the stream
            raise malformed_message()
        return raw


def _too_many(what: str, key: str) -> KvloomError:
    return KvloomError(
        ErrorReason.ERROR_REASON_RATE_LIMITED,
        f"{what}, which is the most that one may have ({key}).",
        retry_after_seconds=RETRY_SECONDS,
    )
