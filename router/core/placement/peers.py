"""Policies of other routers, from their public sources and papers, applied to kvloom's view of the fleet.

The default policy is measured against them, and they can be used in service as well.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from router.core.placement.policy import Arrival, Candidate, Policy


class Conductor(Policy):
    """Mooncake's Conductor: the lowest time to first token, queued plus own uncached prefill (FAST '25)."""

    terms = ("queue", "own_prefill")

    def costs(self, arrival: Arrival, candidates: Sequence[Candidate]) -> list[tuple[float, ...]]:
        return [(c.queue_seconds, c.own_seconds) for c in candidates]


class Dynamo(Policy):
    """NVIDIA Dynamo's KV router: overlap_weight x prefill blocks (queued and own uncached) + decode blocks."""

    terms = ("prefill_blocks", "decode_blocks")

    def __init__(self, overlap_weight: float = 1.0) -> None:
        self._overlap_weight = overlap_weight

    def costs(self, arrival: Arrival, candidates: Sequence[Candidate]) -> list[tuple[float, ...]]:
        return [
            (
                self._overlap_weight * (c.num_queued_prefill_tokens + c.num_prefill_tokens) / c.block_size,
                (c.num_context_tokens + arrival.num_tokens) / c.block_size,
            )
            for c in candidates
        ]


class Gaie(Policy):
    """Gateway API inference extension / llm-d, default scorers: 2 x short queue + 2 x free KV + 3 x prefix share, each
    in [0, 1]; here as the distance from the full score."""

    terms = ("queue", "kv_use", "prefix_missing")

    def costs(self, arrival: Arrival, candidates: Sequence[Candidate]) -> list[tuple[float, ...]]:
        shortest = min(c.num_waiting for c in candidates)
        span = max(c.num_waiting for c in candidates) - shortest
        return [
            (
                2.0 * (c.num_waiting - shortest) / span if span else 0.0,
                2.0 * min(c.num_used_blocks / c.num_blocks, 1.0),
                3.0 * (1.0 - c.num_overlap_tokens / arrival.num_tokens),
            )
            for c in candidates
        ]


class LMetric(Policy):
    """LMetric: uncached tokens x sequences that would be in flight."""

    terms = ("tokens_x_requests",)

    def costs(self, arrival: Arrival, candidates: Sequence[Candidate]) -> list[tuple[float, ...]]:
        return [(float(c.num_prefill_tokens * (c.num_running + c.num_waiting + 1)),) for c in candidates]


class SglangCacheAware(Policy):
    """SGLang's / SMG's `cache_aware`: in a balanced fleet, the deepest prefix match when it covers enough of the
    prompt, on the shard that stored it last; otherwise the emptiest cache. In an unbalanced fleet, the shortest queue.
    """

    terms = ("rank",)
    MATCH_THRESHOLD: Final = 0.3
    MIN_IMBALANCE: Final = 64
    IMBALANCE_RATIO: Final = 1.5
    MAX_REMEMBERED_BLOCKS: Final = 500_000

    def __init__(self) -> None:
        self._last_placed: OrderedDict[int, str] = OrderedDict()
        """Block hash → the shard that it was placed on last."""

    def costs(self, arrival: Arrival, candidates: Sequence[Candidate]) -> list[tuple[float, ...]]:
        in_flight = [c.num_running + c.num_waiting for c in candidates]
        fewest, most = min(in_flight), max(in_flight)
        if most - fewest > self.MIN_IMBALANCE and most > self.IMBALANCE_RATIO * fewest:
            return [(float(count),) for count in in_flight]
        shard_id, num_matched_blocks = self._match(arrival)
        if num_matched_blocks * candidates[0].block_size > self.MATCH_THRESHOLD * arrival.num_tokens:
            return [(0.0 if c.shard_id == shard_id else 1.0,) for c in candidates]
        return [(c.num_used_blocks,) for c in candidates]

    def placed(self, arrival: Arrival, shard_id: str) -> None:
        last_placed = self._last_placed
        for block_hash in arrival.block_hashes:
            last_placed[block_hash] = shard_id
            last_placed.move_to_end(block_hash)
        while len(last_placed) > self.MAX_REMEMBERED_BLOCKS:
            last_placed.popitem(last=False)

    def _match(self, arrival: Arrival) -> tuple[str, int]:
        shard_id, depth = "", 0
        for block_hash in arrival.block_hashes:
            found = self._last_placed.get(block_hash)
            if found is None:
                break
            shard_id, depth = found, depth + 1
        return shard_id, depth
