"""Calls methods of DirectoryService."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import grpc
import grpc.aio

from edge_http.admin.requests import as_caller_knows, request_of
from edge_http.admin.routes import AdminRoute
from kvloom.errors import control_unavailable
from kvloom.transport.grpc_errors import error_from_peer
from kvloom.v1 import directory_service_pb2_grpc
from kvloom_common.transport.plain_messages import as_plain

CALL_SECONDS: Final = 30.0


async def call_directory(
    channel: grpc.aio.Channel | None,
    route: AdminRoute,
    raw_path: str,
    query: Mapping[str, str],
    body: bytes,
    metadata: Sequence[tuple[str, str]],
) -> dict[str, Any]:
    """The response to a request of these, as JSON has it. `channel`: to control; None if it is away. Raises
    KvloomError."""
    wanted = request_of(route, raw_path, query, body)
    if channel is None:
        raise control_unavailable()
    stub = directory_service_pb2_grpc.DirectoryServiceStub(channel)
    try:
        return as_plain(await getattr(stub, route.method)(wanted, metadata=metadata, timeout=CALL_SECONDS))
    except grpc.aio.AioRpcError as error:
        raise as_caller_knows(error_from_peer(error) or control_unavailable(), route) from error
    except grpc.aio.UsageError as error:  # the channel was closed, since control has gone
        raise control_unavailable() from error
