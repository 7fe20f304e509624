"""A log line for every RPC that ends, if the access log is on. It names the request by the caller's id only: the
message has not been parsed here."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

import grpc
import structlog

from kvloom_common.callers import Callers
from kvloom_common.process.access_log import AccessLog
from kvloom_common.process.request_context import request_fields
from router.caller_scope import caller_name
from router.rpc.own_rpcs import Behaviour, Context, OwnRpcInterceptor, codecs_of

log = structlog.get_logger()

MAX_ID_CHARS: Final = 256
_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}


class RpcAccessLog(OwnRpcInterceptor):
    def __init__(self, access_log: AccessLog, callers: Callers) -> None:
        self._access_log = access_log
        self._callers = callers

    def handler(self, handler: Any, details: grpc.HandlerCallDetails) -> Any:
        if not self._access_log.is_on:
            return handler
        method, codecs = str(details.method), codecs_of(handler)
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
            "rpc_ended",
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
