"""FleetRecords is what the registry says about a whole fleet: every process that announces itself. FleetRegistry reads
it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping

from kvloom_common.config import RedisConfig
from kvloom_common.discovery.records import ProcessRecord, RouterRecord, ShardRecord
from kvloom_common.discovery.registry import ProcessRegistry, Registry, RouterRegistry, ShardRegistry
from kvloom_common.trust.seal import Sealer


@dataclasses.dataclass(frozen=True)
class FleetRecords:
    """By name (routers, of which two may have one name while one replaces the other: by address)."""

    shards: Mapping[str, ShardRecord] = dataclasses.field(default_factory=dict)
    routers: Mapping[str, RouterRecord] = dataclasses.field(default_factory=dict)
    edges: Mapping[str, ProcessRecord] = dataclasses.field(default_factory=dict)
    safety: Mapping[str, ProcessRecord] = dataclasses.field(default_factory=dict)
    control: Mapping[str, ProcessRecord] = dataclasses.field(default_factory=dict)
    orchestrators: Mapping[str, ProcessRecord] = dataclasses.field(default_factory=dict)
    supervisors: Mapping[str, ProcessRecord] = dataclasses.field(default_factory=dict)
    num_ignored: int = 0
    """Records that this fabric has not signed."""

    def num_of(self, role: str) -> int:
        by_role = {
            "shard": self.shards,
            "router": self.routers,
            "edge": self.edges,
            "safety": self.safety,
            "control": self.control,
            "orchestrator": self.orchestrators,
        }
        return len(by_role[role])

    @property
    def num_usable(self) -> int:
        return len(self.supervisors) + sum(
            map(self.num_of, ("shard", "router", "edge", "safety", "control", "orchestrator"))
        )


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
