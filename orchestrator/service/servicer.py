"""OrchestratorService: what edges ask."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Final, TypeVar

import msgspec

import orchestrator.api.batches
import orchestrator.api.conversations
import orchestrator.api.vector_stores  # noqa: F401  (its operations are part of the table)
from kvloom.errors import KvloomError
from kvloom.transport.grpc_errors import abort
from kvloom.v1 import orchestrator_service_pb2_grpc
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.orchestrator_service_pb2 import (
    BeginResponseRequest,
    BeginResponseResponse,
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
from kvloom_common.database.database import Database
from kvloom_common.database.failures import DATABASE_ERRORS, database_error
from orchestrator.api import files, responses
from orchestrator.api.call import OPERATIONS, OperationCall
from orchestrator.background.log import MAX_PIECE, ResponseLogs
from orchestrator.files.sealed import TenantContents
from orchestrator.metrics import CALLS
from orchestrator.search.searcher import Searcher
from orchestrator.service.file_streams import write_file

ANSWER_SECONDS: Final = 10.0
"""How long an edge waits for a database that neither answers nor fails."""

LOOK_SECONDS: Final = 0.1
"""How often somebody who reads a response that runs nowhere yet, or elsewhere, looks for its events."""
_MAKE_WORK: Final = (
    *("cancelResponse", "createBatch", "cancelBatch"),
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
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`logs`: of the background responses at which this process works. `wake` is called when there is work."""
        self._database = database
        self._settings = settings
        self._contents = contents
        self._searcher = searcher
        self._logs = logs
        self._wake = wake
        self._clock = clock

    async def Operate(self, request: OperateRequest, context: Any) -> OperateResponse:
        do = OPERATIONS.get(request.operation)
        if do is None:  # an edge of a newer version
            message = f"This orchestrator does not know the operation {request.operation[:64]!r}."
            await abort(context, KvloomError(ErrorReason.ERROR_REASON_NOT_IMPLEMENTED, message))
        body = msgspec.json.decode(request.body) if request.body else {}
        call = self._call(request.owner, ids=tuple(request.ids), query=dict(request.query), body=body)
        answer = await self._answer(request.operation, do(call), context)
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

        work = write_file(self._call(first.owner), requests())
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

    def _call(self, owner: Owner, **more: Any) -> OperationCall:
        return OperationCall(
            *(self._database, self._contents, self._searcher, self._settings),
            *(owner.tenant, owner.key_id, self._clock()),
            **more,
        )

    async def _answer(
        self, name: str, work: Coroutine[Any, Any, T], context: Any, answer_seconds: float | None = ANSWER_SECONDS
    ) -> T:
        try:
            answer = await self._database.uninterrupted(work, answer_seconds)
        except KvloomError as error:
            failure = error
        except DATABASE_ERRORS as error:
            unavailable = ErrorReason.ERROR_REASON_ORCHESTRATOR_UNAVAILABLE
            failure = database_error(name, error, unavailable, "of stored objects")
        else:
            CALLS.labels(name, "").inc()
            return answer
        CALLS.labels(name, failure.reason_name).inc()
        await abort(context, failure)
        raise AssertionError
