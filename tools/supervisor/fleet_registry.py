"""Reads what the registry says about a whole fleet."""

from __future__ import annotations

import asyncio

from kvloom_common.config import RedisConfig
from kvloom_common.discovery.records import ProcessRecord, RouterRecord, ShardRecord
from kvloom_common.discovery.registry import ProcessRegistry, Registry, RouterRegistry, ShardRegistry
from kvloom_common.trust.seal import Sealer
from tools.supervisor.fleet_records import FleetRecords


class FleetRegistry:
    """Reads all kinds of records. `close` it."""

    def __init__(self, redis: RedisConfig, sealer: Sealer) -> None:
        url, prefix = redis.url, redis.key_prefix
        self._shards = ShardRegistry(url, prefix, sealer)
        self._routers = RouterRegistry(url, prefix, sealer)
        self._edges = ProcessRegistry(url, prefix, "edge", sealer)
        self._safety = ProcessRegistry(url, prefix, "safety", sealer)
        self._control = ProcessRegistry(url, prefix, "control", sealer)
        self.supervisors = ProcessRegistry(url, prefix, "supervisor", sealer)

    async def read(self) -> FleetRecords:
        """Raises redis.exceptions.RedisError and OSError when the registry cannot be read."""
        shards, routers, edges, safety, control, supervisors = await asyncio.gather(
            self._shards.list_shards(),
            self._routers.list_routers(),
            self._edges.list_records(),
            self._safety.list_records(),
            self._control.list_records(),
            self.supervisors.list_records(),
        )
        num_ignored = sum(registry.num_ignored for registry in self._all)
        return FleetRecords(shards, routers, edges, safety, control, supervisors, num_ignored)

    async def close(self) -> None:
        await asyncio.gather(*(registry.close() for registry in self._all))

    @property
    def _all(self) -> list[Registry[ShardRecord] | Registry[RouterRecord] | Registry[ProcessRecord]]:
        return [self._shards, self._routers, self._edges, self._safety, self._control, self.supervisors]
