"""The shard registry in Redis: shards announce themselves, routers look who is there.

One key per shard (`<prefix>:shard:<shard_id>`, JSON `ShardRecord`) that expires unless it is announced again, one set
with the ids, and a channel (`<prefix>:shards`) that wakes routers when a shard comes or goes. A router never drops a
connected shard because Redis is away: the connection is the truth, the registry only says whom to connect to.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

import msgspec
import redis.asyncio
import redis.asyncio.retry
import redis.backoff

HEARTBEAT_SECONDS: Final = 1.0
TTL_SECONDS: Final = 5.0


class ShardRecord(msgspec.Struct, frozen=True):
    shard_id: str
    address: str
    """gRPC target."""
    model: str
    incarnation_id: str


class ShardRegistry:
    """Raises redis.exceptions.RedisError when the server cannot be reached."""

    def __init__(self, url: str, key_prefix: str) -> None:
        # Callers try again by themselves, every heartbeat; the client's own retries would only hide the outage.
        retry = redis.asyncio.retry.Retry(redis.backoff.NoBackoff(), 0)
        self._redis = redis.asyncio.Redis.from_url(url, socket_timeout=2.0, socket_connect_timeout=2.0, retry=retry)
        self._prefix = key_prefix

    async def announce(self, record: ShardRecord) -> None:
        """Say that a shard is there for the next TTL_SECONDS."""
        key = self._key(record.shard_id)
        is_news = not await self._redis.exists(key)
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.set(key, msgspec.json.encode(record), px=round(TTL_SECONDS * 1000))
            pipe.sadd(self._ids_key, record.shard_id)
            if is_news:
                pipe.publish(self._channel, record.shard_id)
            await pipe.execute()

    async def withdraw(self, shard_id: str) -> None:
        """Say that a shard has gone."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.delete(self._key(shard_id))
            pipe.srem(self._ids_key, shard_id)
            pipe.publish(self._channel, shard_id)
            await pipe.execute()

    async def list_shards(self) -> dict[str, ShardRecord]:
        """All shards whose announcement has not expired, by shard_id."""
        members = await self._redis.smembers(self._ids_key)
        ids = sorted(member.decode() if isinstance(member, bytes) else member for member in members)
        if not ids:
            return {}
        values = await self._redis.mget([self._key(shard_id) for shard_id in ids])
        found: dict[str, ShardRecord] = {}
        expired: list[str] = []
        for shard_id, value in zip(ids, values, strict=True):
            if value is None:
                expired.append(shard_id)
            else:
                found[shard_id] = msgspec.json.decode(value, type=ShardRecord)
        if expired:
            await self._redis.srem(self._ids_key, *expired)
        return found

    async def watch(self, poll_seconds: float = HEARTBEAT_SECONDS) -> AsyncIterator[None]:
        """Yields whenever it is time to look again: at once on news, else every `poll_seconds`. Ends with RedisError
        when the server goes away."""
        async with self._redis.pubsub() as pubsub:
            await pubsub.subscribe(self._channel)
            while True:
                yield
                await pubsub.get_message(ignore_subscribe_messages=True, timeout=poll_seconds)

    async def close(self) -> None:
        await self._redis.aclose()

    @property
    def _ids_key(self) -> str:
        return f"{self._prefix}:shard_ids"

    @property
    def _channel(self) -> str:
        return f"{self._prefix}:shards"

    def _key(self, shard_id: str) -> str:
        return f"{self._prefix}:shard:{shard_id}"
