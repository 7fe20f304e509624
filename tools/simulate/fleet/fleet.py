"""The options of a simulated fleet, and its modelled shards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Final, Literal

import msgspec

from router.core.actions import Action
from router.core.core import CoreConfig
from tools.simulate.fleet.engine_order import EngineOrder, FirstComeFirstServed, ShortestPrefillFirst
from tools.simulate.fleet.kv_cache import ModelledKvCache
from tools.simulate.fleet.peer_fetch import PeerLink
from tools.simulate.fleet.profile import Profile
from tools.simulate.fleet.scaling import FleetScaler
from tools.simulate.fleet.shard import SimShard
from tools.simulate.lease_owners import SimulatedLimits

MODEL: Final = "simulated"
"""The name of the model of a fleet that has only one."""


class ModelFleet(msgspec.Struct, frozen=True, kw_only=True):
    """The shards of one model."""

    name: str
    num_shards: int
    profile: Profile
    capacity_blocks: int | None = None
    """KV blocks of a shard. None means the capacity in the profile."""

    def __post_init__(self) -> None:
        if self.num_shards < 1:
            raise ValueError("a fleet needs at least one shard and one router")
        if self.capacity_blocks is not None and self.capacity_blocks < 1:
            raise ValueError(f"a shard needs at least one KV block, not {self.capacity_blocks}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """The options of a fleet. Raises ValueError for impossible ones."""

    profile: Profile
    num_shards: int
    """The number of shards of all models together."""
    models: Sequence[ModelFleet] = ()
    """Models by name, whose shards follow one another. () means a single one without a name, with `num_shards`,
    `profile` and `capacity_blocks`."""
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
    has_tenants: bool = True
    """True when the router is told the tenants of calls."""
    has_classes: bool = True
    """True when the router is told which calls are batch, and so each shard which ones are urgent."""
    scaler: FleetScaler | None = None
    """Decides how many of the shards there are. None: all of them, all the time."""
    limits: SimulatedLimits | None = None
    """The limits of the tenants of calls. None: there are none, and answers end where they ended."""
    max_model_len: int = 2**40
    """The window of the shards in tokens, which bounds what a call without `max_tokens` may cost."""
    on_action: Callable[[Action, float], None] | None = None
    """Called with every action of every router and its time."""

    def __post_init__(self) -> None:
        if self.num_routers < 1:
            raise ValueError("a fleet needs at least one shard and one router")
        if sum(part.num_shards for part in self.parts) != self.num_shards:
            raise ValueError(f"the models have other numbers of shards than {self.num_shards} together")
        if self.speed_factors and len(self.speed_factors) != self.num_shards:
            raise ValueError(f"{len(self.speed_factors)} speed factors for {self.num_shards} shards")
        if any(not factor > 0 for factor in self.speed_factors):
            raise ValueError("speed factors must be above 0")
        if not self.sample_interval_seconds > 0 or self.staleness_seconds < 0:
            raise ValueError("the sample interval must be above 0, staleness not below")

    @property
    def parts(self) -> Sequence[ModelFleet]:
        """The models, or the only one."""
        return self.models or (
            ModelFleet(
                name=MODEL, num_shards=self.num_shards, profile=self.profile, capacity_blocks=self.capacity_blocks
            ),
        )


def make_shards(options: FleetOptions, block_size: int) -> list[SimShard]:
    """The shards of all models, in their order."""
    shards: list[SimShard] = []
    for part in options.parts:
        shards += _make_shards(options, part, block_size, len(shards))
    return shards


def _make_shards(options: FleetOptions, part: ModelFleet, block_size: int, first_index: int) -> list[SimShard]:
    """The shards of one model are called as in a fleet that has only this one: names decide between equal costs."""
    profile = part.profile
    label = f"shard-{part.name}" if options.models else "shard"
    num_blocks = part.capacity_blocks or profile.capacity_tokens // block_size
    caches = [ModelledKvCache(num_blocks) for _ in range(part.num_shards)]
    bandwidth = options.peer_fetch_bytes_per_second
    shards: list[SimShard] = []
    for index, cache in enumerate(caches, first_index):
        slowness = options.speed_factors[index] if options.speed_factors else 1.0
        order: EngineOrder = FirstComeFirstServed(profile.chunk_tokens)
        if options.engine_order == "shortest_prefill":
            order = ShortestPrefillFirst(profile, block_size, cache)
        peers = [peer for peer in caches if peer is not cache]
        peer_link = PeerLink(profile, block_size, bandwidth, slowness, peers) if bandwidth else None
        shards.append(
            SimShard(
                f"{label}-{index - first_index}",
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
