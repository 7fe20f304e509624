"""Keeps a process in the registry, through Redis being away."""

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
    """`run` announces until it is cancelled; then `withdraw`, which closes the registry."""

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
                    log.warning("the registry cannot be reached; trying on", error=str(error))
                reachable = False
            else:
                if not reachable:
                    log.info("the registry can be reached again")
                reachable = True
            await asyncio.sleep(seconds_to_aligned_tick(time.monotonic(), HEARTBEAT_SECONDS))

    async def withdraw(self) -> None:
        """Those who look hear of it at once; without Redis the announcement expires by itself."""
        try:
            await self._registry.withdraw(self._record.key)
        except (redis.exceptions.RedisError, OSError) as error:
            log.warning("could not withdraw from the registry", error=str(error))
        await self._registry.close()


def reachable_address(address: str) -> str:
    """What processes elsewhere can connect to: this machine's name instead of "any interface"."""
    host, _, port = address.rpartition(":")
    return f"{socket.gethostname()}:{port}" if host in ("0.0.0.0", "[::]") else address
