"""Keeps one `ShardLink` for every shard that is registered or still connected."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

import redis.exceptions
import structlog

from kvloom.discovery.registry import ShardRecord, ShardRegistry
from kvloom.process.cancellation import raise_if_cancelled
from router.core_driver import CoreDriver
from router.links.reconnect import Backoff
from router.links.shard_link import ShardLink

log = structlog.get_logger()

MAX_SHARDS: Final = 4096


class FleetWatcher:
    """Reads the registry whenever it has news. While Redis is away nothing changes: connected shards stay."""

    def __init__(self, registry: ShardRegistry, router_id: str, dispatcher: CoreDriver) -> None:
        self._registry = registry
        self._router_id = router_id
        self._dispatcher = dispatcher
        self._links: dict[str, tuple[ShardLink, asyncio.Task[None]]] = {}
        self._looked = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled; ends its links first."""
        try:
            async with asyncio.TaskGroup() as links:
                await self._watch(links)
        finally:
            self._links.clear()

    async def first_look(self) -> None:
        """Until every shard of the registry has been tried, or the registry cannot be read."""
        await self._looked.wait()
        while untried := [link for link, _ in self._links.values() if not link.tried.is_set()]:
            await untried[0].tried.wait()

    async def _watch(self, links: asyncio.TaskGroup) -> None:
        backoff = Backoff()
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            try:
                async for _ in self._registry.watch():
                    self._follow(await self._registry.list_shards(), links)
                    self._looked.set()
            except (redis.exceptions.RedisError, OSError) as error:
                log.warning("the shard registry cannot be read", cause=type(error).__name__, num_links=len(self._links))
                for link, _ in self._links.values():
                    link.expected_incarnation_id = ""
            except Exception:  # e.g. a record that is no ShardRecord: one bad announcement must not end the watch
                log.exception("the shard registry holds something unexpected")
            raise_if_cancelled()
            self._looked.set()
            await asyncio.sleep(backoff.next_seconds(loop.time() - started))

    def _follow(self, records: Mapping[str, ShardRecord], links: asyncio.TaskGroup) -> None:
        for shard_id, (link, task) in list(self._links.items()):
            record = records.get(shard_id)
            link.registered = record is not None
            link.expected_incarnation_id = link.record.incarnation_id
            is_other = record is not None and record.incarnation_id != link.record.incarnation_id
            if is_other or (record is None and not link.connected):
                # Another process has taken the name, or nobody is there to be connected to.
                task.cancel()
            if task.done() or is_other or (record is None and not link.connected):
                del self._links[shard_id]
                link.tried.set()  # whoever waits for it looks who is there instead
        for shard_id, record in records.items():
            if shard_id not in self._links and len(self._links) < MAX_SHARDS:
                self._start(record, links)

    def _start(self, record: ShardRecord, links: asyncio.TaskGroup) -> None:
        link = ShardLink(record, self._router_id, self._dispatcher)
        task = links.create_task(link.run(), name=f"shard link {record.shard_id}")
        self._links[record.shard_id] = (link, task)
