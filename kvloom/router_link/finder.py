"""Where the routers are: a fixed list, or those that announce themselves in the registry."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final

import redis.exceptions
import structlog

from kvloom.config import KvloomConfig
from kvloom.discovery.registry import RouterRegistry
from kvloom.router_link.group import RouterGroup

log = structlog.get_logger()

RETRY_SECONDS: Final = 1.0


def configured_routers(config: KvloomConfig) -> list[str]:
    """Addresses (host:port) that need no registry: `edge.routers`, else the one of [router]."""
    if config.edge.routers:
        return list(config.edge.routers)
    return [f"{config.router.host}:{config.router.port}"] if config.router.port else []


@contextlib.asynccontextmanager
async def linked_routers(config: KvloomConfig, client_id: str) -> AsyncIterator[RouterGroup]:
    """A link to all routers there are, now and later, for a process called `client_id`."""
    group = RouterGroup(client_id, reattach_seconds=config.edge.reattach_seconds)
    finder = RouterFinder(config, group.set_routers)
    finder.start()
    await group.start()
    try:
        yield group
    finally:
        await finder.close()
        await group.close()


class RouterFinder:
    """Tells `found` all addresses, and the incarnation that is announced at each ("": not known), whenever they may
    have changed: `edge.routers`, else those in the registry, else the one of [router]. While Redis is away the
    addresses stay, and who listens there is not known: a router that is started anew in its old place is taken."""

    def __init__(self, config: KvloomConfig, found: Callable[[Mapping[str, str]], None]) -> None:
        self._configured = dict.fromkeys(configured_routers(config), "")
        self._found = found
        self._last: Mapping[str, str] = self._configured
        """What was found when the registry could be read last."""
        looks = bool(config.redis.url) and not config.edge.routers
        self._registry = RouterRegistry(config.redis.url, config.redis.key_prefix) if looks else None
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
                    # A registry that has just lost everything is filled again within a heartbeat.
                    records = await registry.list_routers()
                    routers = {address: record.incarnation_id for address, record in records.items()}
                    self._last = routers or self._configured
                    if self._last:
                        self._found(self._last)
            except (redis.exceptions.RedisError, OSError) as error:
                log.warning("the registry of routers cannot be read", cause=type(error).__name__)
            except Exception:  # e.g. a record of another version: one bad announcement must not end the watch
                log.exception("the registry of routers holds something unexpected")
            self._found(dict.fromkeys(self._last, ""))
            await asyncio.sleep(RETRY_SECONDS)
