"""Notifies routers of requests that a client has abandoned while their router may still be alive. The router then ends
them, and credits the tokens that were metered and never received (docs/adr/0011)."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Sequence
from typing import Final

import grpc

from kvloom.backoff import Backoff
from kvloom.transport.channel_options import OpenChannel, open_plain_channel
from kvloom.v1.router_service_pb2 import CancelRequest
from kvloom.v1.router_service_pb2_grpc import RouterServiceStub

MAX_WAITING: Final = 4096
"""Beyond that the oldest are dropped without a notification."""
FIRST_PAUSE_SECONDS: Final = 0.1
LONGEST_PAUSE_SECONDS: Final = 1.0
"""A router that hung and is being replaced may be reachable again only for as long as it takes to stop."""
CALL_TIMEOUT_SECONDS: Final = 5.0
LAST_CALL_TIMEOUT_SECONDS: Final = 1.0
"""The timeout of the last calls, when the client is closed."""
GIVE_UP_SECONDS: Final = 600.0
"""A router that hangs is back by then, or will not be."""


class CancelNotifier:
    """Cancellations that wait for their routers, by address. One task sends them, while there are any."""

    def __init__(self, open_channel: OpenChannel = open_plain_channel) -> None:
        self._open_channel = open_channel
        self._waiting: dict[tuple[str, bytes], tuple[CancelRequest, float]] = {}
        """By address and serialized cancellation: the cancellation, and the time at which to drop it."""
        self._task: asyncio.Task[None] | None = None

    @property
    def num_waiting(self) -> int:
        """Cancellations that their routers have not acknowledged."""
        return len(self._waiting)

    def add(self, address: str, settlement: CancelRequest) -> None:
        """Send `settlement` to the router at `address` as soon as it can be reached."""
        self._waiting[address, settlement.SerializeToString()] = (settlement, time.monotonic() + GIVE_UP_SECONDS)
        if len(self._waiting) > MAX_WAITING:
            del self._waiting[next(iter(self._waiting))]
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._notify_all(), name="cancel notifier")

    async def close(self) -> None:
        """Try once more to send what waits, and drop the rest."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if self._waiting:
            await self._notify_once(LAST_CALL_TIMEOUT_SECONDS)
            self._waiting.clear()

    async def _notify_all(self) -> None:
        backoff = Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, jitter=lambda: random.uniform(0.5, 1.0))
        while self._waiting:
            await self._notify_once(CALL_TIMEOUT_SECONDS)
            now = time.monotonic()
            self._waiting = {key: entry for key, entry in self._waiting.items() if entry[1] > now}
            if self._waiting:
                await asyncio.sleep(backoff.next_seconds())

    async def _notify_once(self, timeout_seconds: float) -> None:
        """Send each router its cancellations, as far as it can be reached; those that were acknowledged are removed."""
        by_address: dict[str, list[CancelRequest]] = {}
        for (address, _), (settlement, _) in self._waiting.items():
            by_address.setdefault(address, []).append(settlement)
        calls = (self._notify(address, settlements, timeout_seconds) for address, settlements in by_address.items())
        await asyncio.gather(*calls)

    async def _notify(self, address: str, settlements: Sequence[CancelRequest], timeout_seconds: float) -> None:
        async with self._open_channel(address) as channel:
            stub = RouterServiceStub(channel)
            with contextlib.suppress(grpc.aio.AioRpcError):
                for settlement in settlements:
                    await stub.Cancel(settlement, timeout=timeout_seconds)
                    self._waiting.pop((address, settlement.SerializeToString()), None)
