"""What a simulated fleet is made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

from router.core.actions import Action
from router.core.core import CoreConfig
from tools.simulate.fleet.fleet_model import Profile


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """Raises ValueError for options that make no sense."""

    profile: Profile
    num_shards: int
    policy: str = "ect"
    seed: int = 0
    num_routers: int = 1
    """Call i goes to router i % num_routers."""
    capacity_blocks: int | None = None
    """KV blocks of a shard; None: what the profile holds."""
    staleness_seconds: float = 0.0
    """Age of load reports and KV events when they reach a router. 0: it sees every shard as it is."""
    engine_order: Literal["fcfs", "shortest_prefill"] = "fcfs"
    peer_fetch_bytes_per_second: float = 0.0
    """Bandwidth at which a shard can fetch KV blocks from another; 0: it cannot."""
    speed_factors: Sequence[float] = ()
    """Shard i is this many times slower than the profile; (): all alike."""
    sample_interval_seconds: float = 1.0
    core_config: CoreConfig | None = None
    """None: no safety service, nothing is refused, nothing times out, `policy` as above."""
    on_action: Callable[[Action, float], None] | None = None
    """Called with every action of every router and its time."""

    def __post_init__(self) -> None:
        if self.num_shards < 1 or self.num_routers < 1:
            raise ValueError("a fleet needs at least one shard and one router")
        if self.capacity_blocks is not None and self.capacity_blocks < 1:
            raise ValueError(f"a shard needs at least one KV block, not {self.capacity_blocks}")
        if self.speed_factors and len(self.speed_factors) != self.num_shards:
            raise ValueError(f"{len(self.speed_factors)} speed factors for {self.num_shards} shards")
        if any(not factor > 0 for factor in self.speed_factors):
            raise ValueError("speed factors must be above 0")
        if not self.sample_interval_seconds > 0 or self.staleness_seconds < 0:
            raise ValueError("the sample interval must be above 0, staleness not below")
