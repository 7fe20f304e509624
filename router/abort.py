"""How an RPC of the router ends in an error of the catalogue."""

from __future__ import annotations

from typing import Any, NoReturn, cast

import grpc

from kvloom.errors import KvloomError
from kvloom.grpc_errors import to_grpc_status


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: KvloomError) -> NoReturn:
    """End the RPC with the error's status and its ErrorInfo. Raises, as gRPC's own abort does."""
    # The published type stubs of grpc.aio do not know this method.
    await cast(Any, context).abort_with_status(to_grpc_status(error))
    raise AssertionError("abort_with_status raises")
