"""Calls of the control service, by edges and commands that ask it now and then."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Final

import grpc
import grpc.aio

from kvloom.access.tenant_follower import ROLE, control_finder
from kvloom.config import KvloomConfig
from kvloom.errors import KvloomError
from kvloom.trust.fabric_trust import FabricTrust
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.usage_service_pb2_grpc import UsageServiceStub

CALL_SECONDS: Final = 10.0
"""A time limit for calls."""


class ControlClient:
    """`watch` must run: it finds the service."""

    def __init__(self, config: KvloomConfig, own_name: str, trust: FabricTrust) -> None:
        self._trust = trust
        self._finder = control_finder(config, own_name, trust)

    async def watch(self) -> None:
        await self._finder.run()

    @contextlib.asynccontextmanager
    async def usage(self) -> AsyncIterator[UsageServiceStub]:
        """For calls within the context. Raises KvloomError (CONTROL_UNAVAILABLE) if there is no control service, or a
        call within fails."""
        await self._finder.found.wait()
        candidates = self._finder.candidates()
        if not candidates:
            raise _unavailable("none is known")
        try:
            async with self._trust.open_channel(candidates[0], ROLE) as channel:
                yield UsageServiceStub(channel)
        except grpc.aio.AioRpcError as error:
            raise _unavailable(error.details() or error.code().name) from error


def _unavailable(cause: str) -> KvloomError:
    return KvloomError(
        ErrorReason.ERROR_REASON_CONTROL_UNAVAILABLE,
        f"The control service cannot be reached ({cause}).",
        retry_after_seconds=1.0,
    )
