"""A Redis client whose commands can be cancelled."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import redis.asyncio

from kvloom_common.process.cancellation import num_cancellations

if TYPE_CHECKING:
    from redis.asyncio.retry import Retry

    _Base = redis.asyncio.Connection
else:
    _Base = object


class _CancellableConnection(_Base):
    """The library connects and sends each command within `asyncio.wait_for`. Before Python 3.12 that loses a
    cancellation which arrives just as this is done, and the task runs on. A task that was cancelled before, and cleans
    up, may send commands."""

    async def connect(self) -> None:
        async with self._cancellable():
            await super().connect()

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        async with self._cancellable():
            await super().send_packed_command(command, check_health)

    @contextlib.asynccontextmanager
    async def _cancellable(self) -> AsyncIterator[None]:
        """Raises CancelledError at the end if the task was cancelled meanwhile."""
        before = num_cancellations()
        yield
        if num_cancellations() > before:
            await self.disconnect(nowait=True)  # the reply will not be read
            raise asyncio.CancelledError


def redis_client(url: str, *, timeout_seconds: float, retry: Retry) -> redis.asyncio.Redis:
    """A client that connects on first use. `timeout_seconds` limits connecting, sending, and waiting for a reply."""
    client = redis.asyncio.Redis.from_url(
        url, socket_timeout=timeout_seconds, socket_connect_timeout=timeout_seconds, retry=retry
    )
    pool = client.connection_pool
    pool.connection_class = type("CancellableConnection", (_CancellableConnection, pool.connection_class), {})
    return client
