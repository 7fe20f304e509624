"""Answers malformed messages with INVALID_ARGUMENT, and callers that may not call a method with PERMISSION_DENIED.

gRPC itself answers malformed messages with UNKNOWN and the name of a Python class, and logs a stack trace for each.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from kvloom.errors import KvloomError, invalid_argument
from kvloom.transport.grpc_errors import abort
from kvloom.v1.error_reason_pb2 import ErrorReason

_Behaviour = Callable[[Any, Any], Coroutine[Any, Any, Any]]
MayCall = Callable[[str, Any], bool]
"""Called with "SERVICE/METHOD" and the context of a call (FabricTrust.may_call)."""


class CheckedServer:
    """Is given to the generated `add_...Servicer_to_server` in place of the server. The methods of the
    servicer must be coroutine functions; those that answer with a stream may be asynchronous generators."""

    def __init__(self, server: grpc.aio.Server, may_call: MayCall | None = None) -> None:
        """Without `may_call`, all who reach the server may call all methods."""
        self._server: Any = server  # the published type stubs do not know all methods
        self._may_call = may_call

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """The older of the two ways in which generated code registers methods, which it still calls."""
        self._server.add_generic_rpc_handlers(tuple(_CheckedHandlers(handler, self._may_call) for handler in handlers))

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler]) -> None:
        checked = {name: _checked(handler, f"{service}/{name}", self._may_call) for name, handler in handlers.items()}
        self._server.add_registered_method_handlers(service, checked)


class _CheckedHandlers(grpc.GenericRpcHandler):
    def __init__(self, handlers: grpc.GenericRpcHandler, may_call: MayCall | None) -> None:
        self._handlers = handlers
        self._may_call = may_call

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        handler = self._handlers.service(handler_call_details)
        method = handler_call_details.method.removeprefix("/")
        return None if handler is None else _checked(handler, method, self._may_call)


def _checked(handler: Any, method: str, may_call: MayCall | None) -> grpc.RpcMethodHandler:
    """A single request is parsed here, before the method is called. The messages of a stream are parsed as the method
    reads them, which costs nothing more per message."""
    if handler.request_streaming:
        return grpc.stream_stream_rpc_method_handler(
            _allowed(_catching(handler.stream_stream), method, may_call),
            handler.request_deserializer,
            handler.response_serializer,
        )
    make = grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
    behaviour = handler.unary_stream if handler.response_streaming else handler.unary_unary
    parsing = _parsing(behaviour, handler.request_deserializer)
    return make(_allowed(parsing, method, may_call), None, handler.response_serializer)


def _allowed(behaviour: _Behaviour, method: str, may_call: MayCall | None) -> _Behaviour:
    if may_call is None:
        return behaviour

    async def checked(requests: Any, context: Any) -> Any:
        if not may_call(method, context):
            message = f"This process's role in the fabric may not call {method}."
            await abort(context, KvloomError(ErrorReason.ERROR_REASON_PERMISSION_DENIED, message))
        return await behaviour(requests, context)

    return checked


def _parsing(behaviour: _Behaviour, parse: Callable[[bytes], Any]) -> _Behaviour:
    async def checked(raw: bytes, context: Any) -> Any:
        try:
            request = parse(raw)
        except DecodeError:
            await _refuse(context)
        del raw  # the request may run for minutes
        if not inspect.isasyncgenfunction(behaviour):
            return await behaviour(request, context)
        async for response in behaviour(request, context):
            await context.write(response)
        return None

    return checked


def _catching(behaviour: Any) -> _Behaviour:
    async def checked(requests: Any, context: Any) -> Any:
        try:
            if inspect.isasyncgenfunction(behaviour):
                async for response in behaviour(requests, context):
                    await context.write(response)
            else:
                await behaviour(requests, context)
        except DecodeError:
            await _refuse(context)

    return checked


async def _refuse(context: Any) -> NoReturn:
    await abort(context, malformed_message())


def malformed_message() -> KvloomError:
    return invalid_argument("A message is malformed: it is not of the type that this method takes.", "")
