"""The modelled shards of a fleet, made from its options."""

from __future__ import annotations

from tools.simulate.fleet.engine_order import EngineOrder, FirstComeFirstServed, ShortestPrefillFirst
from tools.simulate.fleet.fleet_options import FleetOptions
from tools.simulate.fleet.kv_cache import KvCache
from tools.simulate.fleet.peer_fetch import PeerLink
from tools.simulate.fleet.shard import SimShard


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
