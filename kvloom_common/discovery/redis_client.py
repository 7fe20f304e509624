"""A Redis client whose commands can be cancelled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import redis.asyncio

from kvloom_common.process.cancellation import raise_if_cancelled

if TYPE_CHECKING:
    from redis.asyncio.retry import Retry

    _Base = redis.asyncio.Connection
else:
    _Base = object


class _CancellableConnection(_Base):
    """The library sends each command within `asyncio.wait_for`. Before Python 3.12 that loses a cancellation which
    arrives just as the command has been sent, and the task runs on."""

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        await super().send_packed_command(command, check_health)
        try:
            raise_if_cancelled()
        except BaseException:
            await self.disconnect(nowait=True)  # the reply will not be read
            raise


def redis_client(url: str, *, timeout_seconds: float, retry: Retry) -> redis.asyncio.Redis:
    """A client that connects on first use. `timeout_seconds` limits connecting, sending, and waiting for a reply."""
    client = redis.asyncio.Redis.from_url(
        url, socket_timeout=timeout_seconds, socket_connect_timeout=timeout_seconds, retry=retry
    )
    pool = client.connection_pool
    pool.connection_class = type("CancellableConnection", (_CancellableConnection, pool.connection_class), {})
    return client
