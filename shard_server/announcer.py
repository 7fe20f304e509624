"""Keeps this shard in the registry, through Redis being away."""

from __future__ import annotations

import asyncio

import redis.exceptions
import structlog

from kvloom.registry import HEARTBEAT_SECONDS, ShardRecord, ShardRegistry

log = structlog.get_logger()


class Announcer:
    """`run` announces until it is cancelled; then `withdraw`."""

    def __init__(self, registry: ShardRegistry, record: ShardRecord) -> None:
        self._registry = registry
        self._record = record

    async def run(self) -> None:
        reachable = True
        while True:
            try:
                await self._registry.announce(self._record)
            except (redis.exceptions.RedisError, OSError) as error:
                if reachable:
                    log.warning("the registry cannot be reached; trying on", error=str(error))
                reachable = False
            else:
                if not reachable:
                    log.info("the registry can be reached again")
                reachable = True
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def withdraw(self) -> None:
        """Routers hear of it at once; without Redis the announcement expires by itself."""
        try:
            await self._registry.withdraw(self._record.shard_id)
        except (redis.exceptions.RedisError, OSError) as error:
            log.warning("could not withdraw from the registry", error=str(error))
        await self._registry.close()
