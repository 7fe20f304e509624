"""Keeps a process announced in the registry, also across outages of Redis."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
import time
import uuid
from collections.abc import AsyncIterator
from typing import Generic

import redis.exceptions
import structlog

from kvloom_common.addresses import bare_host, join_address, split_address
from kvloom_common.config import KvloomConfig
from kvloom_common.discovery.records import NameTakenError, ProcessRecord, ProcessRole, Record
from kvloom_common.discovery.registry import HEARTBEAT_SECONDS, TTL_SECONDS, ProcessRegistry, Registry
from kvloom_common.process.aligned_timer import seconds_to_aligned_tick
from kvloom_common.trust.seal import Sealer

log = structlog.get_logger()


class Announcer(Generic[Record]):
    """Announces one process. `run` does so until it is cancelled; call `withdraw` then, which also closes the
    registry."""

    def __init__(self, registry: Registry[Record], record: Record) -> None:
        self._registry = registry
        self._record: Record = record

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
                log.warning("announcement_delayed", cause=str(error))
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
                if error.is_successor and error.holder.incarnation_id != taken_by:
                    log.info("announcement_replaced", address=error.holder.address)
                elif error.holder.incarnation_id != taken_by:
                    log.error("announcement_lost", cause=str(error))  # noqa: TRY400
                taken_by = error.holder.incarnation_id
            except (redis.exceptions.RedisError, OSError) as error:
                if reachable:
                    log.warning("announcement_failed", error=str(error))
                reachable = False
            else:
                if not reachable:
                    log.info("announcement_resumed")
                if taken_by:
                    log.info("announcement_restored")
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
            log.warning("announcement_withdrawal_failed", error=str(error))
        await self._registry.close()


def name_owner(data_dir: str) -> str:
    """Who gives names: all processes of one data directory on one machine have the same one. A digest, because paths
    are nobody else's business."""
    return hashlib.blake2b(f"{socket.gethostname()}\0{data_dir}".encode(), digest_size=8).hexdigest()


@contextlib.asynccontextmanager
async def announced_process(
    config: KvloomConfig,
    role: ProcessRole,
    record: ProcessRecord,
    sealer: Sealer,
) -> AsyncIterator[None]:
    """Announce an edge, a safety or control service, or a supervisor as long as the context lasts; without Redis this
    does nothing. Raises NameTakenError if another process has its name."""
    if not config.redis.url:
        yield
        return
    announcer = Announcer(ProcessRegistry(config.redis.url, config.redis.key_prefix, role, sealer), record)
    try:
        await announcer.wait_for_name()
    except BaseException:
        await announcer.close()
        raise
    announcing = asyncio.create_task(announcer.run(), name="announcer")
    announcing.add_done_callback(_report_failure)
    try:
        yield
    finally:
        # The Redis client loses a cancellation that comes while its connection breaks.
        while not announcing.done():
            announcing.cancel()
            await asyncio.wait({announcing}, timeout=0.2)
        await announcer.withdraw()


def _report_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("announcer_failed", exc_info=error)


def process_record(config: KvloomConfig, name: str, address: str, url: str = "") -> ProcessRecord:
    """That of a process that listens at `address`, with a new incarnation."""
    return ProcessRecord(name, advertised_address(config, address), uuid.uuid4().hex, name_owner(config.data_dir), url)


def fabric_host(config: KvloomConfig, host: str) -> str:
    """Where a process listens for the others of its fabric. `host`: that of its own section."""
    return config.fabric.host or host


def advertised_address(config: KvloomConfig, address: str) -> str:
    """The address at which processes on other machines reach what listens at `address` for its fabric."""
    host, port = split_address(address)
    is_wildcard = host in ("0.0.0.0", "::")
    advertised = config.fabric.advertised_host
    if advertised and (is_wildcard or host == bare_host(config.fabric.host)):
        return join_address(advertised, port)
    return join_address(socket.gethostname(), port) if is_wildcard else address
