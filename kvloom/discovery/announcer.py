"""Keeps a process announced in the registry, also across outages of Redis."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import time
from typing import Generic, TypeVar

import redis.exceptions
import structlog

from kvloom.discovery.registry import (
    HEARTBEAT_SECONDS,
    TTL_SECONDS,
    MetricsTarget,
    NameTakenError,
    Registry,
    RouterRecord,
    ShardRecord,
)
from kvloom.process.aligned_timer import seconds_to_aligned_tick

log = structlog.get_logger()

_Record = TypeVar("_Record", ShardRecord, RouterRecord, MetricsTarget)


class Announcer(Generic[_Record]):
    """Announces one process. `run` does so until it is cancelled; call `withdraw` then, which also closes the
    registry."""

    def __init__(self, registry: Registry[_Record], record: _Record) -> None:
        self._registry = registry
        self._record: _Record = record

    async def wait_for_name(self) -> None:
        """Return when no other process has this one's name. Raises NameTakenError if one keeps it, that is, for longer
        than the announcement of a dead process lasts."""
        deadline = time.monotonic() + TTL_SECONDS + HEARTBEAT_SECONDS
        while True:
            try:
                await self._registry.check_free(self._record)
            except (redis.exceptions.RedisError, OSError):
                return  # `run` reports it and tries again
            except NameTakenError as error:
                if time.monotonic() > deadline:
                    raise
                log.warning("The name of this process is taken; waiting until it is free.", cause=str(error))
            else:
                return
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def run(self) -> None:
        reachable = True
        taken_by = ""
        while True:
            try:
                await self._registry.announce(self._record)
            except NameTakenError as error:
                if error.holder.incarnation_id != taken_by:
                    log.error("Routers do not find this process any more.", cause=str(error))  # noqa: TRY400
                taken_by = error.holder.incarnation_id
            except (redis.exceptions.RedisError, OSError) as error:
                if reachable:
                    log.warning("The registry cannot be reached; retrying.", error=str(error))
                reachable = False
            else:
                if not reachable:
                    log.info("The registry can be reached again.")
                if taken_by:
                    log.info("Routers find this process again.")
                reachable, taken_by = True, ""
            await asyncio.sleep(seconds_to_aligned_tick(time.monotonic(), HEARTBEAT_SECONDS))

    async def close(self) -> None:
        """Instead of `withdraw`, for a process that was never announced."""
        await self._registry.close()

    async def withdraw(self) -> None:
        """Remove the announcement; the watchers are notified at once. If Redis is unreachable, it expires by itself."""
        try:
            await self._registry.withdraw(self._record.key, self._record.incarnation_id)
        except (redis.exceptions.RedisError, OSError) as error:
            log.warning("The process could not be withdrawn from the registry.", error=str(error))
        await self._registry.close()


def name_owner(data_dir: str) -> str:
    """Who gives names: all processes of one data directory on one machine have the same one. A digest, because paths
    are nobody else's business."""
    return hashlib.blake2b(f"{socket.gethostname()}\0{data_dir}".encode(), digest_size=8).hexdigest()


def reachable_address(address: str) -> str:
    """The address for processes on other machines: this machine's name instead of a wildcard host."""
    host, _, port = address.rpartition(":")
    return f"{socket.gethostname()}:{port}" if host in ("0.0.0.0", "[::]") else address
