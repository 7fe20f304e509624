"""OrchestratorService: what edges ask."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

import orchestrator.api.batches
import orchestrator.api.erasures
import orchestrator.api.feedback
import orchestrator.api.file_texts
import orchestrator.api.history
import orchestrator.api.retention
import orchestrator.api.uploads
import orchestrator.api.vector_stores
import orchestrator.api.webhooks  # noqa: F401  (its operations are part of the table)
from kvloom.errors import KvloomError
from kvloom.transport.grpc_errors import abort
from kvloom.v1 import orchestrator_service_pb2_grpc
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.orchestrator_service_pb2 import (
    BeginResponseRequest,
    BeginResponseResponse,
    ExportRequest,
    ExportResponse,
    KeepResponseRequest,
    KeepResponseResponse,
    OperateRequest,
    OperateResponse,
    Owner,
    ReadContextRequest,
    ReadContextResponse,
    ReadEventsRequest,
    ReadEventsResponse,
    ReadFileRequest,
    ReadFileResponse,
    WriteFileRequest,
    WriteFileResponse,
)
from kvloom_common.config import OrchestratorConfig
from kvloom_common.database.database import DATABASE_ERRORS, Database, database_error
from kvloom_common.trust.state_seal import StateSealer
from orchestrator.api import exports, files, responses
from orchestrator.api.call import OPERATIONS, OperationCall
from orchestrator.background.log import MAX_PIECE, ResponseLogs
from orchestrator.files.sealed import TenantContents
from orchestrator.metrics import CALLS
from orchestrator.search.file_texts import FileTexts
from orchestrator.search.searcher import Searcher
from orchestrator.service.file_streams import write_file, write_part

if TYPE_CHECKING:
    from orchestrator.store.hot_items import HotItems
    from orchestrator.tracing import OrchestratorTracing

ANSWER_SECONDS: Final = 10.0
"""How long an edge waits for a database that neither answers nor fails."""

LOOK_SECONDS: Final = 0.1
"""How often somebody who reads a response that runs nowhere yet, or elsewhere, looks for its events."""
_SLOW: Final = ("completeUpload", "readFileText")
"""Operations that write or read contents of files."""
_SLOW_SECONDS: Final = 300.0
_MAKE_WORK: Final = (
    *("cancelResponse", "createBatch", "cancelBatch", "createErasure"),
    *("createVectorStore", "createVectorStoreFile", "createVectorStoreFileBatch"),
)

T = TypeVar("T")


class OrchestratorServicer(orchestrator_service_pb2_grpc.OrchestratorServiceServicer):
    """`clock`: the seconds since 1970."""

    def __init__(
        self,
        database: Database,
        settings: OrchestratorConfig,
        contents: TenantContents,
        searcher: Searcher,
        logs: ResponseLogs,
        wake: Callable[[], None],
        sealer: StateSealer,
        clock: Callable[[], float] = time.time,
        tracing: OrchestratorTracing | None = None,
        hot_items: HotItems | None = None,
    ) -> None:
        """`logs`: of the background responses at which this process works. `wake` is called when there is work.
        `sealer`: for secrets. `tracing`: None where there are no traces. `hot_items`: None where conversations are not
        copied."""
        self._tracing = tracing
        self._hot_items = hot_items
        self._database = database
        self._settings = settings
        self._contents = contents
        self._searcher = searcher
        self._texts = FileTexts()
        self._logs = logs
        self._wake = wake
        self._sealer = sealer
        self._clock = clock

    async def Operate(self, request: OperateRequest, context: Any) -> OperateResponse:
        do = OPERATIONS.get(request.operation)
        if do is None:  # an edge of a newer version
            await abort(context, _unknown_operation(request.operation))
        body = msgspec.json.decode(request.body) if request.body else {}
        call = self._call(request.owner, ids=tuple(request.ids), query=dict(request.query), body=body)
        seconds = _SLOW_SECONDS if request.operation in _SLOW else ANSWER_SECONDS
        answer = await self._answer(request.operation, do(call), context, seconds)
        if request.operation in _MAKE_WORK:
            self._wake()
        return OperateResponse(body=msgspec.json.encode(answer))

    async def ReadContext(self, request: ReadContextRequest, context: Any) -> ReadContextResponse:
        return await self._answer("ReadContext", responses.read_context(self._call(request.owner), request), context)

    async def KeepResponse(self, request: KeepResponseRequest, context: Any) -> KeepResponseResponse:
        await self._answer("KeepResponse", responses.keep(self._call(request.owner), request), context)
        return KeepResponseResponse()

    async def BeginResponse(self, request: BeginResponseRequest, context: Any) -> BeginResponseResponse:
        call = self._call(request.kept.owner)
        await self._answer("BeginResponse", responses.begin(call, request), context)
        self._wake()
        return BeginResponseResponse()

    async def ReadEvents(self, request: ReadEventsRequest, context: Any) -> AsyncIterator[ReadEventsResponse]:
        call = self._call(request.owner, ids=(request.response_id,))
        await self._answer("ReadEvents", responses.check_has_events(call), context)
        yield ReadEventsResponse()
        try:
            async for piece in self._events(call, request.num_known):
                yield ReadEventsResponse(events=piece)
        except KvloomError as error:
            await abort(context, error)

    async def _events(self, call: OperationCall, num_known: int) -> AsyncIterator[list[bytes]]:
        """From this process where it generates the response, else as soon as it has ended. Raises KvloomError."""
        while True:
            log = self._logs.get(call.ids[0])
            if log is not None:
                async for piece in log.read(num_known):
                    num_known += len(piece)
                    yield piece
                if not log.is_lost:
                    return
            known, is_over = await self._database.uninterrupted(responses.stored_events(call))
            for first in range(num_known, len(known), MAX_PIECE):
                yield known[first : first + MAX_PIECE]
            if is_over:
                return
            await asyncio.sleep(LOOK_SECONDS)

    async def WriteFile(self, request_iterator: AsyncIterator[WriteFileRequest], context: Any) -> None:
        first = await anext(request_iterator, WriteFileRequest())

        async def requests() -> AsyncIterator[WriteFileRequest]:
            yield first
            async for request in request_iterator:
                yield request

        call = self._call(first.owner)
        work = write_part(call, first.upload_id, requests()) if first.upload_id else write_file(call, requests())
        await context.write(
            WriteFileResponse(body=msgspec.json.encode(await self._answer("WriteFile", work, context, None)))
        )

    async def ReadFile(self, request: ReadFileRequest, context: Any) -> AsyncIterator[ReadFileResponse]:
        call = self._call(request.owner, ids=(request.file_id,))
        one = await self._answer("ReadFile", files.find(call), context)
        yield ReadFileResponse(body=msgspec.json.encode(files.shown(one)))
        try:
            async for piece in self._contents.read(call.tenant, one.id):
                yield ReadFileResponse(piece=piece)
        except KvloomError as error:
            await abort(context, error)

    async def Export(self, request: ExportRequest, context: Any) -> AsyncIterator[ExportResponse]:
        name = request.operation
        if name not in exports.EXPORTS:  # an edge of a newer version
            await abort(context, _unknown_operation(name))
        call = self._call(request.owner, ids=tuple(request.ids), query=dict(request.query))
        await self._answer(name, exports.check(call, name), context)
        yield ExportResponse()
        try:
            async for lines in exports.export(call, name):
                yield ExportResponse(lines=lines)
        except KvloomError as error:
            await abort(context, error)
        except DATABASE_ERRORS as error:
            await abort(context, _away(name, error))

    def _call(self, owner: Owner, **more: Any) -> OperationCall:
        held = self._database, self._contents, self._searcher, self._texts, self._settings, self._sealer
        return OperationCall(*held, owner.tenant, owner.key_id, self._clock(), hot_items=self._hot_items, **more)

    async def _answer(
        self, name: str, work: Coroutine[Any, Any, T], context: Any, answer_seconds: float | None = ANSWER_SECONDS
    ) -> T:
        tracing = self._tracing
        span = contextlib.nullcontext() if tracing is None else tracing.answering(name, context.invocation_metadata())
        try:
            with span:
                answer = await self._database.uninterrupted(work, answer_seconds)
        except KvloomError as error:
            failure = error
        except DATABASE_ERRORS as error:
            failure = _away(name, error)
        else:
            CALLS.labels(name, "").inc()
            return answer
        CALLS.labels(name, failure.reason_name).inc()
        await abort(context, failure)
        raise AssertionError


def _unknown_operation(name: str) -> KvloomError:
    message = f"This orchestrator does not know the operation {name[:64]!r}."
    return KvloomError(ErrorReason.ERROR_REASON_NOT_IMPLEMENTED, message)


def _away(name: str, error: Exception) -> KvloomError:
    return database_error(name, error, ErrorReason.ERROR_REASON_ORCHESTRATOR_UNAVAILABLE, "of stored objects")
