"""Finds the routers: a fixed list of addresses, or the routers that announce themselves in the registry."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final

import grpc.aio
import redis.exceptions
import structlog

from kvloom.router_link.group import RouterGroup
from kvloom.transport.channel_options import CHANNEL_OPTIONS
from kvloom_common.addresses import join_address
from kvloom_common.config import KvloomConfig
from kvloom_common.discovery.registry import RouterRegistry
from kvloom_common.trust.fabric_trust import NO_SECRET, FabricTrust
from kvloom_common.trust.seal import PLAIN, Sealer

log = structlog.get_logger()

RETRY_SECONDS: Final = 1.0


def configured_routers(config: KvloomConfig) -> list[str]:
    """The addresses (host:port) that need no registry: `edge.routers`, otherwise the one of [router]."""
    if config.edge.routers:
        return list(config.edge.routers)
    return [join_address(config.router.host, config.router.port)] if config.router.port else []


@contextlib.asynccontextmanager
async def linked_routers(
    config: KvloomConfig, client_id: str, trust: FabricTrust = NO_SECRET
) -> AsyncIterator[RouterGroup]:
    """A link to all routers, including those that are started later, for a process called `client_id`."""

    def open_channel(address: str) -> grpc.aio.Channel:
        return trust.open_channel(address, "router", options=CHANNEL_OPTIONS)

    group = RouterGroup(client_id, reattach_seconds=config.edge.reattach_seconds, open_channel=open_channel)
    finder = RouterFinder(config, group.set_routers, trust.sealer)
    finder.start()
    await group.start()
    try:
        yield group
    finally:
        await finder.close()
        await group.close()


class RouterFinder:
    """Calls `found` with all router addresses, and the incarnation that is announced at each ("": not known), whenever
    they may have changed. The addresses are `edge.routers`, otherwise those in the registry, otherwise the one of
    [router]. While Redis is unreachable the addresses stay the same and the incarnations are not known: a router that
    was restarted at its old address is then accepted."""

    def __init__(
        self, config: KvloomConfig, found: Callable[[Mapping[str, str]], None], sealer: Sealer = PLAIN
    ) -> None:
        self._configured = dict.fromkeys(configured_routers(config), "")
        self._found = found
        self._last: Mapping[str, str] = self._configured
        """The result of the last successful read of the registry."""
        looks = bool(config.redis.url) and not config.edge.routers
        self._registry = RouterRegistry(config.redis.url, config.redis.key_prefix, sealer) if looks else None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._registry is None:
            self._found(self._configured)
        else:
            self._task = asyncio.create_task(self._watch(self._registry), name="router finder")

    async def close(self) -> None:
        if self._task is not None:
            # The Redis client loses a cancellation that comes while its connection breaks.
            while not self._task.done():
                self._task.cancel()
                await asyncio.wait({self._task}, timeout=0.2)
            self._task = None
        if self._registry is not None:
            await self._registry.close()

    async def _watch(self, registry: RouterRegistry) -> None:
        while True:
            try:
                async for _ in registry.watch():
                    # If the registry has just lost everything, the routers announce themselves within a heartbeat.
                    records = await registry.list_routers()
                    routers = {address: record.incarnation_id for address, record in records.items()}
                    self._last = routers or self._configured
                    if self._last:
                        self._found(self._last)
            except (redis.exceptions.RedisError, OSError) as error:
                log.warning("registry_read_failed", cause=type(error).__name__)
            except Exception:  # e.g. a record of another version: one bad announcement must not end the watch
                log.exception("registry_reader_broke")
            self._found(dict.fromkeys(self._last, ""))
            await asyncio.sleep(RETRY_SECONDS)
