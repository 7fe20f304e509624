"""The RPCs of kvloom's own services, and what they are called with. Others, such as health checks and reflection, need
neither keys nor log lines."""

from __future__ import annotations

import abc
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

Context = grpc.aio.ServicerContext[Any, Any]
Behaviour = Callable[[Any, Context], Awaitable[Any]]


def is_own(details: grpc.HandlerCallDetails) -> bool:
    return str(details.method).startswith("/kvloom.")


class OwnRpcInterceptor(grpc.aio.ServerInterceptor, abc.ABC):
    """gRPC calls it for every RPC that a server receives. Handlers of other services stay as they are."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        return (
            handler
            if handler is None or not is_own(handler_call_details)
            else self.handler(handler, handler_call_details)
        )

    @abc.abstractmethod
    def handler(self, handler: Any, details: grpc.HandlerCallDetails) -> Any:
        """Returns what is called instead of `handler`."""


def codecs_of(handler: Any) -> dict[str, Any]:
    """How a handler's messages are read and written, for one that stands in for it."""
    return {"request_deserializer": handler.request_deserializer, "response_serializer": handler.response_serializer}
