"""Attempts that a client has given up, and whose routers may live: they are told, so that they end them and credit what
was metered and never came (docs/adr/0011)."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Sequence
from typing import Final

import grpc

from kvloom.transport.channel_options import CHANNEL_OPTIONS
from kvloom.v1.router_service_pb2 import CancelRequest
from kvloom.v1.router_service_pb2_grpc import RouterServiceStub

MAX_LOST: Final = 4096
"""Beyond that the oldest are not spoken of any more."""
FIRST_PAUSE_SECONDS: Final = 0.1
LONGEST_PAUSE_SECONDS: Final = 1.0
"""A router that hung and is replaced may be back for no longer than it takes to stop."""
CALL_TIMEOUT_SECONDS: Final = 5.0
LAST_CALL_TIMEOUT_SECONDS: Final = 1.0
"""When the client is closed."""
GIVE_UP_SECONDS: Final = 600.0
"""A router that hangs is back by then, or will not be."""


class CancelNotifier:
    """By the address of their router. One task, while there are any."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, bytes], tuple[CancelRequest, float]] = {}
        """By address and settlement: what to say, and until when."""
        self._task: asyncio.Task[None] | None = None

    @property
    def num_waiting(self) -> int:
        """That their routers have not heard of."""
        return len(self._waiting)

    def add(self, address: str, settlement: CancelRequest) -> None:
        """The router at `address` will hear it as soon as it can be reached."""
        self._waiting[address, settlement.SerializeToString()] = (settlement, time.monotonic() + GIVE_UP_SECONDS)
        if len(self._waiting) > MAX_LOST:
            del self._waiting[next(iter(self._waiting))]
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._tell_all(), name="lost attempts")

    async def close(self) -> None:
        """Those that wait are told now or not at all."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if self._waiting:
            await self._tell_once(LAST_CALL_TIMEOUT_SECONDS)
            self._waiting.clear()

    async def _tell_all(self) -> None:
        pause_seconds = FIRST_PAUSE_SECONDS
        while self._waiting:
            await self._tell_once(CALL_TIMEOUT_SECONDS)
            now = time.monotonic()
            self._waiting = {key: entry for key, entry in self._waiting.items() if entry[1] > now}
            if self._waiting:
                await asyncio.sleep(pause_seconds * random.uniform(0.5, 1.0))
                pause_seconds = min(2.0 * pause_seconds, LONGEST_PAUSE_SECONDS)

    async def _tell_once(self, timeout_seconds: float) -> None:
        """Each router what it has to hear, as far as it can be reached; what is told is forgotten."""
        by_address: dict[str, list[CancelRequest]] = {}
        for (address, _), (settlement, _) in self._waiting.items():
            by_address.setdefault(address, []).append(settlement)
        tellings = (self._tell(address, told, timeout_seconds) for address, told in by_address.items())
        await asyncio.gather(*tellings)

    async def _tell(self, address: str, settlements: Sequence[CancelRequest], timeout_seconds: float) -> None:
        async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            stub = RouterServiceStub(channel)
            with contextlib.suppress(grpc.aio.AioRpcError):
                for settlement in settlements:
                    await stub.Cancel(settlement, timeout=timeout_seconds)
                    self._waiting.pop((address, settlement.SerializeToString()), None)
