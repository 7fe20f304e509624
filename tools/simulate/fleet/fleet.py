"""The options of a simulated fleet, and its modelled shards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

from router.core.actions import Action
from router.core.core import CoreConfig
from tools.simulate.fleet.engine_order import EngineOrder, FirstComeFirstServed, ShortestPrefillFirst
from tools.simulate.fleet.kv_cache import KvCache
from tools.simulate.fleet.peer_fetch import PeerLink
from tools.simulate.fleet.profile import Profile
from tools.simulate.fleet.shard import SimShard


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """The options of a fleet. Raises ValueError for impossible ones."""

    profile: Profile
    num_shards: int
    policy: str = "ect"
    seed: int = 0
    num_routers: int = 1
    """Call i is sent to router i % num_routers."""
    capacity_blocks: int | None = None
    """KV blocks of a shard. None means the capacity in the profile."""
    staleness_seconds: float = 0.0
    """The age of load reports and KV events when they reach a router. With 0 it sees every shard as it is."""
    engine_order: Literal["fcfs", "shortest_prefill"] = "fcfs"
    peer_fetch_bytes_per_second: float = 0.0
    """The bandwidth at which a shard fetches KV blocks from another one. 0 means that it cannot."""
    speed_factors: Sequence[float] = ()
    """How many times slower than the profile each shard is. () means that all have the speed of the profile."""
    sample_interval_seconds: float = 1.0
    core_config: CoreConfig | None = None
    """None means a core with `policy`, without a safety service, that rejects nothing and has no timeouts."""
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


def make_shards(options: FleetOptions, block_size: int) -> list[SimShard]:
    profile = options.profile
    num_blocks = options.capacity_blocks or profile.capacity_tokens // block_size
    caches = [KvCache(num_blocks) for _ in range(options.num_shards)]
    bandwidth = options.peer_fetch_bytes_per_second
    shards: list[SimShard] = []
    for index, cache in enumerate(caches):
        slowness = options.speed_factors[index] if options.speed_factors else 1.0
        order: EngineOrder = FirstComeFirstServed()
        if options.engine_order == "shortest_prefill":
            order = ShortestPrefillFirst(profile, block_size, cache)
        peers = [peer for peer in caches if peer is not cache]
        peer_link = PeerLink(profile, block_size, bandwidth, slowness, peers) if bandwidth else None
        shards.append(
            SimShard(
                f"shard-{index}",
                profile,
                block_size,
                cache,
                num_routers=options.num_routers,
                slowness=slowness,
                order=order,
                peer_link=peer_link,
            )
        )
    return shards
