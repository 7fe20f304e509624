"""FleetRecords is what the registry says about a whole fleet: every process that announces itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from kvloom_common.discovery.records import ProcessRecord, RouterRecord, ShardRecord


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
