"""Refuses RPCs without a valid API key, where keys are needed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc
import structlog

from kvloom.errors import KvloomError
from kvloom.transport.grpc_errors import abort
from kvloom_common.access.api_keys import wrong_key_error
from kvloom_common.callers import Callers
from router.caller_scope import credential_in
from router.rpc.own_rpcs import Behaviour, Context, OwnRpcInterceptor, codecs_of

log = structlog.get_logger()


class ApiKeyCheck(OwnRpcInterceptor):
    def __init__(self, callers: Callers) -> None:
        """`callers` must have API keys."""
        self._callers = callers
        self._open: dict[asyncio.Task[Any], str] = {}
        """The tasks of bidirectional streams, which may last for weeks, and their keys."""
        self._revoked: set[asyncio.Task[Any]] = set()
        if callers.api_keys is not None:
            callers.api_keys.on_change(self._end_revoked)

    def handler(self, handler: Any, details: grpc.HandlerCallDetails) -> Any:
        metadata: Iterable[tuple[str, Any]] = details.invocation_metadata or ()
        credential = credential_in(metadata)
        codecs = codecs_of(handler)
        try:
            self._callers.check(credential)
        except KvloomError as error:
            # As a stream, so that nothing of the request is received.
            return grpc.stream_stream_rpc_method_handler(_refusal(error), **codecs)
        if handler.stream_stream is not None:
            return grpc.stream_stream_rpc_method_handler(self._followed(handler.stream_stream, credential), **codecs)
        return handler

    def _followed(self, behaviour: Behaviour, credential: str) -> Any:
        """The behaviour, which ends when the key is no longer accepted."""

        async def followed(requests: Any, context: Context) -> Any:
            task = asyncio.current_task()
            assert task is not None
            self._open[task] = credential
            try:
                return await behaviour(requests, context)
            except asyncio.CancelledError:
                if task not in self._revoked:
                    raise
                task.uncancel()
                await abort(context, wrong_key_error())
            finally:
                del self._open[task]
                self._revoked.discard(task)

        return followed

    def _end_revoked(self) -> None:
        for task, credential in list(self._open.items()):
            try:
                self._callers.check(credential)
            except KvloomError:
                self._revoked.add(task)
                task.cancel()
        if self._revoked:
            log.info("streams_revoked", cause="api_key", num_streams=len(self._revoked))


def _refusal(error: KvloomError) -> Any:
    async def refuse(_request: Any, context: Context) -> None:
        await abort(context, error)

    return refuse
