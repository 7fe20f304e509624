"""OrchestratorLink asks the orchestrator for stored objects. Requests that neither name nor make any never wait for
it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Final

import grpc.aio

from edge_http.known_contexts import KnownContexts
from kvloom.errors import KvloomError
from kvloom.transport.channel_options import CHANNEL_OPTIONS
from kvloom.transport.grpc_errors import error_from_peer
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.orchestrator_service_pb2 import (
    BeginResponseRequest,
    ExportRequest,
    KeepResponseRequest,
    OperateRequest,
    Owner,
    ReadContextRequest,
    ReadContextResponse,
    ReadEventsRequest,
    ReadFileRequest,
    ReadFileResponse,
    WriteFileRequest,
)
from kvloom.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub
from kvloom_common.access.exposure import is_loopback
from kvloom_common.addresses import join_address
from kvloom_common.config import KvloomConfig
from kvloom_common.discovery.announcer import fabric_host
from kvloom_common.discovery.process_finder import ProcessFinder
from kvloom_common.process.request_context import current_request
from kvloom_common.trust.fabric_trust import FabricTrust

ROLE: Final = "orchestrator"
CALL_SECONDS: Final = 15.0
"""A time limit for calls."""
KNOWN_SECONDS: Final = 1.0
"""That for a context of which this edge has one that may be as good."""


class OrchestratorLink:
    """`watch` must run while requests are served."""

    def __init__(self, config: KvloomConfig, own_name: str, trust: FabricTrust) -> None:
        settings = config.orchestrator
        host = fabric_host(config, settings.host) if is_loopback(settings.host) else settings.host
        configured = join_address(host, settings.port) if settings.port else ""
        self._finder = ProcessFinder(config.redis, ROLE, own_name, configured, trust.sealer)
        self._trust = trust
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._is_traced = bool(config.tracing.otlp_endpoint)
        self._contexts = KnownContexts()

    async def watch(self) -> None:
        try:
            await self._finder.run()
            await asyncio.Event().wait()  # without a registry there is nothing to find
        finally:
            for channel in self._channels.values():
                await channel.close()

    async def operate(
        self,
        owner: Owner,
        operation: str,
        ids: Sequence[str],
        query: Mapping[str, str] | None = None,
        body: bytes = b"",
        seconds: float = CALL_SECONDS,
    ) -> bytes:
        """The JSON of the answer, within so many seconds. Raises KvloomError."""
        wanted = OperateRequest(owner=owner, operation=operation, ids=ids, query=query or {}, body=body)
        try:
            async with self._asking() as stub:
                return (await stub.Operate(wanted, timeout=seconds, metadata=self._metadata())).body
        finally:  # before, a context could be read that this changes
            self._contexts.note_change(owner.tenant, operation)

    async def read_context(self, request: ReadContextRequest) -> tuple[ReadContextResponse, bool]:
        """The items before an input, and True if they are only what was last known, because the orchestrator is slow or
        away. Raises KvloomError."""
        known = self._contexts.find(request)
        try:
            async with self._asking() as stub:
                seconds = CALL_SECONDS if known is None else KNOWN_SECONDS
                found = await stub.ReadContext(request, timeout=seconds, metadata=self._metadata())
        except KvloomError as error:
            if known is None or error.reason != ErrorReason.ERROR_REASON_ORCHESTRATOR_UNAVAILABLE:
                raise
            return known, True
        self._contexts.note_read(request, found)
        return found, False

    async def keep_response(self, request: KeepResponseRequest) -> None:
        """Raises KvloomError."""
        async with self._asking() as stub:
            await stub.KeepResponse(request, timeout=CALL_SECONDS, metadata=self._metadata())
        self._contexts.note_kept(request)

    async def begin_response(self, request: BeginResponseRequest) -> None:
        """Raises KvloomError."""
        async with self._asking() as stub:
            await stub.BeginResponse(request, timeout=CALL_SECONDS, metadata=self._metadata())

    async def read_events(self, owner: Owner, response_id: str, num_known: int) -> AsyncGenerator[Sequence[bytes]]:
        """The events of a background response after the first `num_known`, as they come. The first piece is empty.
        Raises KvloomError."""
        async with self._asking() as stub:
            wanted = ReadEventsRequest(owner=owner, response_id=response_id, num_known=num_known)
            async for response in stub.ReadEvents(wanted, metadata=self._metadata()):
                yield response.events

    async def write_file(self, requests: AsyncIterator[WriteFileRequest]) -> bytes:
        """The JSON of the file. Raises KvloomError, also one that `requests` raises."""
        failure: list[KvloomError] = []

        async def sent() -> AsyncIterator[WriteFileRequest]:
            try:
                async for request in requests:
                    yield request
            except KvloomError as error:  # the upload ends without its last message, which stores nothing
                failure.append(error)

        async with self._asking() as stub:
            try:
                async for response in stub.WriteFile(sent(), metadata=self._metadata()):
                    return response.body
            except grpc.aio.AioRpcError:
                if not failure:
                    raise
        raise failure[0] if failure else unavailable()

    async def read_file(self, owner: Owner, file_id: str) -> AsyncGenerator[ReadFileResponse]:
        """The file, then its pieces. Who does not read to the end closes it. Raises KvloomError."""
        async with self._asking() as stub:
            async for response in stub.ReadFile(
                ReadFileRequest(owner=owner, file_id=file_id), metadata=self._metadata()
            ):
                yield response

    async def export(
        self, owner: Owner, operation: str, ids: Sequence[str], query: Mapping[str, str]
    ) -> AsyncGenerator[bytes]:
        """Lines of JSON. The first piece is empty. Raises KvloomError."""
        async with self._asking() as stub:
            wanted = ExportRequest(owner=owner, operation=operation, ids=ids, query=query)
            async for response in stub.Export(wanted, metadata=self._metadata()):
                yield response.lines

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        """The trace context of the request for which it asks."""
        request = current_request() if self._is_traced else None
        traceparent = "" if request is None else request.log_fields().get("traceparent", "")
        return (("traceparent", traceparent),) if traceparent else ()

    @contextlib.asynccontextmanager
    async def _asking(self) -> AsyncIterator[OrchestratorServiceStub]:
        """For one call within the context. Raises the KvloomError that it ends with."""
        await self._finder.found.wait()
        address = next(iter(self._finder.candidates()), "")
        if not address:
            raise unavailable()
        if address not in self._channels:
            self._channels[address] = self._trust.open_channel(address, ROLE, options=CHANNEL_OPTIONS)
        try:
            yield OrchestratorServiceStub(self._channels[address])
        except grpc.aio.AioRpcError as error:
            raise error_from_peer(error) or unavailable() from error
        except grpc.aio.UsageError as error:  # this edge stops
            raise unavailable() from error


def unavailable() -> KvloomError:
    return KvloomError(
        ErrorReason.ERROR_REASON_ORCHESTRATOR_UNAVAILABLE,
        "The orchestrator, which stores responses and the like, cannot be reached at the moment.",
        retry_after_seconds=1.0,
    )
