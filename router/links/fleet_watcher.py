"""The fleet watcher keeps one `ShardLink` for every shard that is registered or still connected."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Container, Mapping
from typing import Protocol

import redis.exceptions
import structlog

from kvloom_common.discovery.records import ShardRecord
from kvloom_common.models.catalogue import Catalogue
from kvloom_common.process.cancellation import raise_if_cancelled
from kvloom_common.trust.fabric_trust import NO_SECRET, FabricTrust
from router.core_driver import CoreDriver
from router.links.fleet_links import LinkTarget, follow_registry, lose_registry
from router.links.reconnect import reconnect_backoff
from router.links.shard_link import ShardLink
from router.links.tokenizer_claims import TokenizerClaims

log = structlog.get_logger()


@dataclasses.dataclass(frozen=True, slots=True)
class _RunningLink:
    link: ShardLink
    task: asyncio.Task[None]

    @property
    def target(self) -> LinkTarget:
        return self.link.target

    @property
    def connected(self) -> bool:
        return self.link.connected

    @property
    def is_over(self) -> bool:
        return self.task.done()


class ShardSource(Protocol):
    """Where a router finds its shards: the registry (ShardRegistry), or their names (NamedShards)."""

    def watch(self) -> AsyncIterator[None]:
        """Yields whenever the shards should be listed again. Raises RedisError or OSError while that is impossible."""
        ...

    async def list_shards(self, connected: Container[str] = ()) -> dict[str, ShardRecord]:
        """By shard_id. `connected`: those that need not be asked, since a connection to them stands. Raises
        RedisError or OSError."""
        ...

    async def close(self) -> None: ...


class FleetWatcher:
    """Reads the registry whenever it changes. While Redis is unreachable nothing changes: connected shards stay."""

    def __init__(
        self,
        registry: ShardSource,
        router_id: str,
        driver: CoreDriver,
        trust: FabricTrust = NO_SECRET,
        catalogue: Catalogue | None = None,
    ) -> None:
        self._catalogue = catalogue
        self._registry = registry
        self._router_id = router_id
        self._driver = driver
        self._trust = trust
        self._tokenizers = TokenizerClaims()
        self._links: dict[str, _RunningLink] = {}
        self._registry_read = asyncio.Event()
        """Set once the registry has been read, or could not be read, for the first time."""

    async def run(self) -> None:
        """Runs until it is cancelled, and ends its links before it returns."""
        try:
            async with asyncio.TaskGroup() as links:
                await self._watch(links)
        finally:
            self._links.clear()

    async def wait_until_tried(self) -> None:
        """Returns once a connection to every registered shard has been tried, or the registry cannot be read."""
        await self._registry_read.wait()
        while untried := [running.link for running in self._links.values() if not running.link.tried.is_set()]:
            await untried[0].tried.wait()

    async def _watch(self, links: asyncio.TaskGroup) -> None:
        backoff = reconnect_backoff()
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            try:
                async for _ in self._registry.watch():
                    self._follow(await self._registry.list_shards(self._connected), links)
                    self._registry_read.set()
            except (redis.exceptions.RedisError, OSError) as error:
                log.warning("registry_read_failed", cause=type(error).__name__, num_links=len(self._links))
                lose_registry(running.target for running in self._links.values())
            except Exception:  # e.g. a malformed ShardRecord: one bad announcement must not end the watch
                log.exception("registry_reader_broke")
            raise_if_cancelled()
            self._registry_read.set()
            await asyncio.sleep(backoff.next_seconds(loop.time() - started))

    @property
    def _connected(self) -> set[str]:
        return {shard_id for shard_id, running in self._links.items() if running.connected}

    def _follow(self, records: Mapping[str, ShardRecord], links: asyncio.TaskGroup) -> None:
        changes = follow_registry(records, self._links)
        for shard_id in changes.ended:
            running = self._links.pop(shard_id)
            running.task.cancel()
            running.link.tried.set()  # A caller that waits for this link then checks the links that exist now.
        for record in changes.started:
            self._start(record, links)

    def _start(self, record: ShardRecord, links: asyncio.TaskGroup) -> None:
        link = ShardLink(record, self._router_id, self._driver, self._trust, self._catalogue, self._tokenizers)
        task = links.create_task(link.run(), name=f"shard link {record.shard_id}")
        self._links[record.shard_id] = _RunningLink(link, task)
