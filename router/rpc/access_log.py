"""A log line for every RPC that ends, if the access log is on. It names the request by the caller's id only: the
message has not been parsed here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
import structlog

from kvloom.callers import Callers
from kvloom.process.access_log import AccessLog
from kvloom.process.request_context import request_fields
from router.caller_scope import caller_name

log = structlog.get_logger()

_OWN_SERVICES: Final = "/kvloom."
"""Health checks would only drown the others."""
MAX_ID_CHARS: Final = 256
_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}

Context = grpc.aio.ServicerContext[Any, Any]
Behaviour = Callable[[Any, Context], Awaitable[Any]]


class RpcAccessLog(grpc.aio.ServerInterceptor):
    """gRPC calls it for every RPC that a server receives."""

    def __init__(self, access_log: AccessLog, callers: Callers) -> None:
        self._access_log = access_log
        self._callers = callers

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None or not self._access_log.is_on or not method.startswith(_OWN_SERVICES):
            return handler
        codecs = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(self._logged(method, handler.unary_unary), **codecs)
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(self._logged(method, handler.unary_stream), **codecs)
        return grpc.stream_stream_rpc_method_handler(self._logged(method, handler.stream_stream), **codecs)

    def _logged(self, method: str, behaviour: Behaviour) -> Behaviour:
        async def logged(request: Any, context: Context) -> Any:
            started_at = time.monotonic()
            code = ""
            try:
                return await behaviour(request, context)
            except asyncio.CancelledError:
                code = grpc.StatusCode.CANCELLED.name
                raise
            finally:
                self._log_end(method, context, code or _code_of(context), time.monotonic() - started_at)

        return logged

    def _log_end(self, method: str, context: Context, code: str, duration_seconds: float) -> None:
        metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        client_request_id = metadata.get("x-request-id", "")[:MAX_ID_CHARS]
        if not self._access_log.wants(client_request_id):
            return
        caller = caller_name(self._callers, context)
        log.info(
            "rpc",
            **request_fields("", client_request_id, metadata.get("traceparent", "")[:MAX_ID_CHARS], caller),
            method=method,
            code=code,
            duration_seconds=round(duration_seconds, 6),
        )


def _code_of(context: Context) -> str:
    code: Any = context.code()
    if isinstance(code, int):
        code = _CODES.get(code)
    return grpc.StatusCode.OK.name if code is None else str(code.name)
