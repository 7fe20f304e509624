"""The addresses of the processes of one role that may be used: the configured one, and those that announce themselves
in the registry."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

import redis.exceptions
import structlog
import xxhash

from kvloom_common.config import RedisConfig
from kvloom_common.discovery.records import ProcessRole
from kvloom_common.discovery.registry import ProcessRegistry
from kvloom_common.process.cancellation import raise_if_cancelled
from kvloom_common.trust.seal import PLAIN, Sealer

log = structlog.get_logger()

RETRY_SECONDS: Final = 1.0
MAX_CANDIDATES: Final = 16
"""Beyond these no more processes are tried before the first one again."""


class ProcessFinder:
    """`candidates` is current as long as `run` runs. While Redis is unreachable it stays as it is."""

    def __init__(
        self,
        redis_config: RedisConfig | None,
        role: ProcessRole,
        own_name: str,
        configured: str = "",
        sealer: Sealer = PLAIN,
    ) -> None:
        """`configured`: an address that comes before all others; "": there is none. `redis_config`: None if nothing is
        to be found in the registry. `own_name`: the process that looks."""
        self._own_name = own_name
        self._configured = configured
        self._role = role
        self._registry = None
        if redis_config is not None and redis_config.url:
            self._registry = ProcessRegistry(redis_config.url, redis_config.key_prefix, role, sealer)
        self._announced: list[str] = []
        self.found = asyncio.Event()
        """Set once a process is known, or the registry has been read or could not be."""
        if self._configured or self._registry is None:
            self.found.set()

    def candidates(self) -> list[str]:
        """Addresses, best first."""
        return in_order(self._configured, self._announced, self._own_name)

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
                    log.warning("registry_read_failed", role=self._role, cause=type(error).__name__)
                except Exception:  # one bad announcement must not end the watch
                    log.exception("registry_reader_broke", role=self._role)
                raise_if_cancelled()
                self.found.set()
                await asyncio.sleep(RETRY_SECONDS)
        finally:
            await self._registry.close()


def in_order(configured: str, announced: Iterable[str], own_name: str) -> list[str]:
    """The configured address, if there is one, and then the others in an order that differs from process to process, so
    that those that lose one spread over the rest."""
    others = sorted(
        (address for address in set(announced) if address != configured),
        key=lambda address: xxhash.xxh3_64_intdigest(f"{own_name}\0{address}".encode()),
    )
    return [*filter(None, [configured]), *others][:MAX_CANDIDATES]
