"""ShardService over gRPC: the data plane's stream, and the calls that operators and tools make."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple

import grpc
import structlog
from google.protobuf.message import DecodeError

from kvloom.errors import KvloomError, invalid_argument, protocol_violation
from kvloom.transport.grpc_errors import abort
from kvloom.transport.local_stream import deliver
from kvloom.v1 import shard_service_pb2_grpc
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.shard_service_pb2 import (
    DrainRequest,
    DrainResponse,
    GetInfoRequest,
    GetInfoResponse,
    LoadAdapterRequest,
    LoadAdapterResponse,
    ShardServiceConnectRequest,
    ShardServiceConnectResponse,
    SleepRequest,
    SleepResponse,
    UnloadAdapterRequest,
    UnloadAdapterResponse,
    WakeRequest,
    WakeResponse,
    WithdrawRequest,
    WithdrawResponse,
)
from kvloom_common.transport.checked_server import malformed_message
from shard_server.connection import RouterConnection
from shard_server.engine_multiplexer import EngineMultiplexer

log = structlog.get_logger()

HELLO_TIMEOUT_SECONDS: Final = 10.0
FLUSH_SECONDS: Final = 0.5
"""How long the message that is being written may still take when a stream ends."""
MAX_ROUTER_ID_CHARS: Final = 128
MAX_DEADLINE_SECONDS: Final = 7 * 24 * 3600.0

Context = grpc.aio.ServicerContext[ShardServiceConnectRequest, ShardServiceConnectResponse]


class DrainOrder(NamedTuple):
    """See DrainRequest in shard_service.proto."""

    draining: bool
    deadline_seconds: float | None = None
    empty_within_seconds: float | None = None
    exits: bool = False


class ShardServicer(shard_service_pb2_grpc.ShardServiceServicer):
    """`drain` is called for a Drain call. It raises KvloomError when the process is stopping and cannot resume, or
    cannot end by itself. `sleep` and `wake` raise it when the shard cannot. `drain_timeout_seconds` is how
    long an adapter that is unloaded waits for its sequences if the call does not say."""

    def __init__(
        self,
        multiplexer: EngineMultiplexer,
        drain: Callable[[DrainOrder], Awaitable[None]],
        sleep: Callable[[], Awaitable[None]],
        wake: Callable[[], Awaitable[None]],
        drain_timeout_seconds: float,
    ) -> None:
        self._multiplexer = multiplexer
        self._drain = drain
        self._sleep = sleep
        self._wake = wake
        self._drain_timeout_seconds = drain_timeout_seconds

    async def Connect(self, request_iterator: object, context: Context) -> None:
        try:
            connection = self._multiplexer.connect(await _read_hello(context))
        except KvloomError as error:
            await abort(context, error)
        log.info("router_connected", router_id=connection.router_id)
        reader = asyncio.create_task(self._read_frames(connection, context), name=f"{connection.router_id} reader")
        writer = asyncio.create_task(connection.write_frames(context), name=f"{connection.router_id} writer")
        try:
            await asyncio.wait([reader, writer, connection.ended], return_when=asyncio.FIRST_COMPLETED)
            if connection.ended.done() and connection.ended.result() is None:
                # The waiting frames are still written, as long as the router is connected.
                await asyncio.wait([reader, writer], return_when=asyncio.FIRST_COMPLETED)
            self._multiplexer.disconnect(connection)
            connection.end(_violation(reader))
            # gRPC accepts no status while a message is being written, so the writer is cancelled only if the router
            # does not read.
            await asyncio.wait([writer], timeout=FLUSH_SECONDS)
        finally:
            self._multiplexer.disconnect(connection)  # before any await: this task may be cancelled once more
            reader.cancel()
            writer.cancel()
            results = await asyncio.gather(reader, writer, return_exceptions=True)
        await _end_stream(connection, context, results)

    async def GetInfo(self, request: GetInfoRequest, context: Any) -> GetInfoResponse:
        return GetInfoResponse(
            info=self._multiplexer.info,
            load=self._multiplexer.load_report(),
            router_ids=self._multiplexer.router_ids,
            adapters=self._multiplexer.adapters.list,
        )

    async def Drain(self, request: DrainRequest, context: Any) -> DrainResponse:
        error = None
        try:
            await self._drain(_drain_order(request))
        except KvloomError as refusal:
            error = refusal.to_proto()
        return DrainResponse(**self._work(), error=error)

    async def Withdraw(self, request: WithdrawRequest, context: Any) -> WithdrawResponse:
        self._multiplexer.set_withdrawn(request.withdrawn)
        return WithdrawResponse(**self._work())

    async def Sleep(self, request: SleepRequest, context: Any) -> SleepResponse:
        error = None
        try:
            if request.only_announce:
                self._multiplexer.announce_sleep(True)
            else:
                await self._sleep()
        except KvloomError as refusal:
            error = refusal.to_proto()
        return SleepResponse(**self._work(), error=error)

    def _work(self) -> dict[str, int]:
        """Returns the numbers of sequences, for those who wait for the shard's answers to end."""
        load, num_submitted = self._multiplexer.load_report(), self._multiplexer.num_submitted
        return {"num_running": load.num_running, "num_waiting": load.num_waiting, "num_submitted": num_submitted}

    async def Wake(self, request: WakeRequest, context: Any) -> WakeResponse:
        try:
            await self._wake()
        except KvloomError as refusal:
            return WakeResponse(error=refusal.to_proto())
        return WakeResponse()

    async def LoadAdapter(self, request: LoadAdapterRequest, context: Any) -> LoadAdapterResponse:
        try:
            adapter = await self._multiplexer.adapters.load(request.name, request.path, load_now=request.load_now)
        except KvloomError as refusal:
            return LoadAdapterResponse(error=refusal.to_proto())
        return LoadAdapterResponse(adapter=adapter)

    async def UnloadAdapter(self, request: UnloadAdapterRequest, context: Any) -> UnloadAdapterResponse:
        try:
            timeout_seconds = _deadline_seconds(request)
            if timeout_seconds is None:
                timeout_seconds = self._drain_timeout_seconds
            await self._multiplexer.adapters.unload(request.name, timeout_seconds)
        except KvloomError as refusal:
            return UnloadAdapterResponse(error=refusal.to_proto())
        return UnloadAdapterResponse()

    async def _read_frames(self, connection: RouterConnection, context: Context) -> None:
        """Handle frames until the router has closed its side of the stream."""
        await deliver(context, ShardServiceConnectRequest, lambda frame: self._multiplexer.receive(connection, frame))


def _deadline_seconds(request: DrainRequest | UnloadAdapterRequest) -> float | None:
    """Raises KvloomError."""
    if not request.HasField("deadline_seconds"):
        return None
    if not 0 <= request.deadline_seconds <= MAX_DEADLINE_SECONDS:
        raise invalid_argument(f"deadline_seconds must be between 0 and {MAX_DEADLINE_SECONDS:g}.", "deadline_seconds")
    return request.deadline_seconds


def _drain_order(request: DrainRequest) -> DrainOrder:
    """Raises KvloomError."""
    deadline_seconds, within_seconds = _deadline_seconds(request), None
    if request.HasField("empty_within_seconds"):
        within_seconds = request.empty_within_seconds
        if not 0 < within_seconds <= MAX_DEADLINE_SECONDS:
            message = f"empty_within_seconds must be above 0 and at most {MAX_DEADLINE_SECONDS:g}."
            raise invalid_argument(message, "empty_within_seconds")
        if deadline_seconds is not None:
            raise invalid_argument("deadline_seconds and empty_within_seconds exclude each other.", "deadline_seconds")
        if not request.draining:
            raise invalid_argument("Only a shard that drains can be empty soon.", "empty_within_seconds")
    elif request.exit:
        raise invalid_argument("exit needs empty_within_seconds.", "exit")
    return DrainOrder(request.draining, deadline_seconds, within_seconds, request.exit)


def _violation(reader: asyncio.Task[None]) -> KvloomError | None:
    """The router's violation of the protocol, if there was one."""
    error = reader.exception() if reader.done() and not reader.cancelled() else None
    return error if isinstance(error, KvloomError) else None


async def _end_stream(connection: RouterConnection, context: Context, results: Sequence[BaseException | None]) -> None:
    """Send the router the error that ended the stream, if it is still connected."""
    error = connection.ended.result() if connection.ended.done() else None
    for result in results:
        if isinstance(result, KvloomError):
            error = result
        elif isinstance(result, DecodeError):
            error = malformed_message()
        elif isinstance(result, Exception) and not _is_broken_stream(result):
            log.error("router_stream_failed", router_id=connection.router_id, exc_info=result)
            error = KvloomError(ErrorReason.ERROR_REASON_INTERNAL, "The shard failed to serve this stream.")
    log.info("router_disconnected", router_id=connection.router_id, error=error and error.message)
    if error is not None:
        await abort(context, error)


def _is_broken_stream(error: Exception) -> bool:
    return isinstance(error, grpc.RpcError | grpc.aio.UsageError | grpc.aio.InternalError)


async def _read_hello(context: Context) -> str:
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_SECONDS):
            frame = await context.read()
    except TimeoutError:
        raise protocol_violation("No hello came.") from None
    if not isinstance(frame, ShardServiceConnectRequest) or not frame.hello.router_id:
        raise protocol_violation("The first frame must carry a hello with a router_id.")
    if frame.submits or frame.cancel_slots:
        raise protocol_violation("The first frame carries nothing but the hello.")
    return frame.hello.router_id[:MAX_ROUTER_ID_CHARS]
