"""Keeps a process announced in the registry, also across outages of Redis."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Generic, TypeVar

import redis.exceptions
import structlog

from kvloom.discovery.registry import HEARTBEAT_SECONDS, Registry, RouterRecord, ShardRecord
from kvloom.process.aligned_timer import seconds_to_aligned_tick

log = structlog.get_logger()

_Record = TypeVar("_Record", ShardRecord, RouterRecord)


class Announcer(Generic[_Record]):
    """Announces one process. `run` does so until it is cancelled; call `withdraw` then, which also closes the
    registry."""

    def __init__(self, registry: Registry[_Record], record: _Record) -> None:
        self._registry = registry
        self._record: _Record = record

    async def run(self) -> None:
        reachable = True
        while True:
            try:
                await self._registry.announce(self._record)
            except (redis.exceptions.RedisError, OSError) as error:
                if reachable:
                    log.warning("The registry cannot be reached; retrying.", error=str(error))
                reachable = False
            else:
                if not reachable:
                    log.info("The registry can be reached again.")
                reachable = True
            await asyncio.sleep(seconds_to_aligned_tick(time.monotonic(), HEARTBEAT_SECONDS))

    async def withdraw(self) -> None:
        """Remove the announcement; the watchers are notified at once. If Redis is unreachable, it expires by itself."""
        try:
            await self._registry.withdraw(self._record.key)
        except (redis.exceptions.RedisError, OSError) as error:
            log.warning("The process could not be withdrawn from the registry.", error=str(error))
        await self._registry.close()


def reachable_address(address: str) -> str:
    """The address for processes on other machines: this machine's name instead of a wildcard host."""
    host, _, port = address.rpartition(":")
    return f"{socket.gethostname()}:{port}" if host in ("0.0.0.0", "[::]") else address
