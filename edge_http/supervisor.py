"""Calls of the supervisor of this machine, the `kvloom up` that has started this edge."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Final

import grpc
import grpc.aio

from edge_http.edge import Edge
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.supervisor_service_pb2_grpc import SupervisorServiceStub
from kvloom_common.process.control_socket import SOCKET, short_path

CALL_SECONDS: Final = 10.0
_GONE: Final = "This edge was not started by `kvloom up`, or its supervisor does not run."


@contextlib.asynccontextmanager
async def supervisor(edge: Edge, no_supervisor: str = _GONE) -> AsyncIterator[SupervisorServiceStub]:
    """For calls within the context. Raises KvloomError: NOT_IMPLEMENTED, which says `no_supervisor`,
    DEADLINE_EXCEEDED, and FAILED_PRECONDITION with what the supervisor says of a call that failed."""
    gone = KvloomError(ErrorReason.ERROR_REASON_NOT_IMPLEMENTED, no_supervisor)
    try:
        with short_path(edge.run_folder) as short:
            address = f"unix:{short}/{SOCKET}"
            async with grpc.aio.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
                yield SupervisorServiceStub(channel)
    except OSError as error:
        raise gone from error
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            raise gone from error
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            message = "The supervisor took too long: see `kvloom status` for what it has done."
            raise KvloomError(ErrorReason.ERROR_REASON_DEADLINE_EXCEEDED, message) from error
        raise KvloomError(ErrorReason.ERROR_REASON_FAILED_PRECONDITION, f"{error.details()}.") from error
