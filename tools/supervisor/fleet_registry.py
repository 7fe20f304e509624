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
        self._services = [
            ProcessRegistry(url, prefix, role, sealer) for role in ("edge", "safety", "control", "orchestrator")
        ]
        self.supervisors = ProcessRegistry(url, prefix, "supervisor", sealer)

    async def read(self) -> FleetRecords:
        """Raises redis.exceptions.RedisError and OSError when the registry cannot be read."""
        shards, routers, (edges, safety, control, orchestrators, supervisors) = await asyncio.gather(
            self._shards.list_shards(),
            self._routers.list_routers(),
            asyncio.gather(*(one.list_records() for one in (*self._services, self.supervisors))),
        )
        num_ignored = sum(registry.num_ignored for registry in self._all)
        return FleetRecords(shards, routers, edges, safety, control, orchestrators, supervisors, num_ignored)

    async def close(self) -> None:
        await asyncio.gather(*(registry.close() for registry in self._all))

    @property
    def _all(self) -> list[Registry[ShardRecord] | Registry[RouterRecord] | Registry[ProcessRecord]]:
        return [self._shards, self._routers, *self._services, self.supervisors]
