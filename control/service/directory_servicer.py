"""DirectoryService: what administrators ask. The methods are those of control/directory/methods.py."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

import structlog

from control.directory.actor import Actor, actor_from_metadata
from control.directory.methods import READS, WRITES
from control.directory.quotas import Quotas
from control.directory.transaction import changing
from control.replication.versions import Versions
from control.service.metrics import CALLS
from kvloom.errors import KvloomError
from kvloom.transport.grpc_errors import abort
from kvloom.v1 import directory_service_pb2_grpc
from kvloom_common.database.database import DATABASE_ERRORS, Database, database_error

log = structlog.get_logger()

ANSWER_SECONDS: Final = 5.0
"""How long an administrator waits for a database that neither answers nor fails."""


class DirectoryServicer(directory_service_pb2_grpc.DirectoryServiceServicer):
    """Its methods are made from READS and WRITES. `clock`: the seconds since 1970. `quotas`: those of an organisation
    that has none of its own."""

    def __init__(
        self,
        database: Database,
        versions: Versions,
        clock: Callable[[], float] = time.time,
        quotas: Quotas = Quotas(),  # noqa: B008  (frozen)
    ) -> None:
        self._database = database
        self._versions = versions
        self._clock = clock
        self._quotas = quotas
        for method in (*READS, *WRITES):
            setattr(self, method, self._answering(method, self._read if method in READS else self._write))

    async def _read(self, method: str, actor: Actor, request: Any) -> Any:
        async with self._database.reading() as connection:
            return await READS[method](connection, actor, request)

    async def _write(self, method: str, actor: Actor, request: Any) -> Any:
        async with changing(self._database, actor, method, self._clock(), self._quotas) as change:
            response = await WRITES[method](change, request)
        self._versions.notify()
        log.info("directory_changed", method=method, actor=actor.name, organisation=actor.organisation or "")
        return response

    def _answering(
        self, method: str, answer: Callable[[str, Actor, Any], Coroutine[Any, Any, Any]]
    ) -> Callable[[Any, Any], Awaitable[Any]]:
        async def call(request: Any, context: Any) -> Any:
            actor = actor_from_metadata(context.invocation_metadata() or ())
            try:
                response = await self._database.uninterrupted(answer(method, actor, request), ANSWER_SECONDS)
            except KvloomError as error:
                failure = error
            except DATABASE_ERRORS as error:
                failure = database_error(method, error)
            else:
                CALLS.labels(method, "").inc()
                return response
            CALLS.labels(method, failure.reason_name).inc()
            return await abort(context, failure)

        return call
