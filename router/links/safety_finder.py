"""The safety services that a router may use: the configured one, and those that announce themselves in the registry."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

import redis.exceptions
import structlog
import xxhash

from kvloom.access.exposure import is_loopback
from kvloom.config import KvloomConfig
from kvloom.discovery.announcer import fabric_host
from kvloom.discovery.registry import ProcessRegistry
from kvloom.process.cancellation import raise_if_cancelled
from kvloom.trust.seal import PLAIN, Sealer

log = structlog.get_logger()

RETRY_SECONDS: Final = 1.0
MAX_CANDIDATES: Final = 16
"""Beyond these a router tries no more services before it begins again with the first."""


class SafetyFinder:
    """`candidates` is current as long as `run` runs. While Redis is unreachable it stays as it is."""

    def __init__(self, config: KvloomConfig, router_id: str, sealer: Sealer = PLAIN) -> None:
        self._router_id = router_id
        # The service of this machine listens where its fabric does; a configured one may be on another machine.
        host = fabric_host(config, config.safety.host) if is_loopback(config.safety.host) else config.safety.host
        self._configured = f"{host}:{config.safety.port}" if config.safety.port else ""
        self._registry = None
        if config.safety.discover:
            self._registry = ProcessRegistry(config.redis.url, config.redis.key_prefix, "safety", sealer)
        self._announced: list[str] = []
        self.found = asyncio.Event()
        """Set once a service is known, or the registry has been read or could not be."""
        if self._configured or self._registry is None:
            self.found.set()

    def candidates(self) -> list[str]:
        """Addresses, best first: that of this machine, and then those of others."""
        return in_order(self._configured, self._announced, self._router_id)

    async def run(self) -> None:
        """Runs until it is cancelled; returns at once if there is nothing to find."""
        if self._registry is None:
            return
        try:
            while True:
                try:
                    async for _ in self._registry.watch():
                        records = await self._registry.list_records()
                        self._announced = [record.address for record in records.values()]
                        self.found.set()
                except (redis.exceptions.RedisError, OSError) as error:
                    log.warning("the registry of safety services cannot be read", cause=type(error).__name__)
                except Exception:  # one bad announcement must not end the watch
                    log.exception("the registry of safety services holds something unexpected")
                raise_if_cancelled()
                self.found.set()
                await asyncio.sleep(RETRY_SECONDS)
        finally:
            await self._registry.close()


def in_order(configured: str, announced: Iterable[str], router_id: str) -> list[str]:
    """The configured address, if there is one, and then the others in an order that differs from router to router, so
    that the routers that lose one service spread over the rest."""
    others = sorted(
        (address for address in set(announced) if address != configured),
        key=lambda address: xxhash.xxh3_64_intdigest(f"{router_id}\0{address}".encode()),
    )
    return [*filter(None, [configured]), *others][:MAX_CANDIDATES]
