"""ECT, estimated completion cost: when the request would have its first token, plus what it costs everybody else.

All terms are seconds of a shard's time, so that weights are few and dimensionless; docs/routing.md says how they were
chosen, and what they do on traces that they were not chosen on.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

from router.core.placement.policy import Arrival, Candidate, Hold, Policy


@dataclasses.dataclass(frozen=True, slots=True)
class EctWeights:
    lost_capacity: float = 1.0
    """Prefill that a cache hit elsewhere would have saved is time that the fleet loses, whoever has to wait for it."""
    delay_of_waiting: float = 1.0
    """The busier a shard, the more requests will queue up behind this one's prefill."""
    delay_of_running: float = 0.0
    """Sequences that decode share their steps with this prefill."""
    eviction: float = 0.5
    """Share of evicted blocks that would be used again, were they just used."""
    eviction_age_seconds: float = 120.0
    """Blocks that nobody has used for so long are e times less likely to be used again."""
    memory_wait: float = 0.0
    """Weight of the wait for KV blocks that running sequences hold."""


class Ect(Policy):
    terms: ClassVar = ("queue", "own_prefill", "lost_capacity", "delay_of_others", "eviction", "memory")

    def __init__(self, weights: EctWeights | None = None, hold: Hold | None = None) -> None:
        self._weights = weights or EctWeights()
        self.hold = hold

    def costs(self, arrival: Arrival, candidates: Sequence[Candidate]) -> list[tuple[float, ...]]:
        return [self._cost(candidate) for candidate in candidates]

    def _cost(self, c: Candidate) -> tuple[float, ...]:
        w = self._weights
        own = c.own_seconds
        eviction = 0.0
        if c.num_evicted_blocks:
            recompute_seconds = c.num_evicted_blocks * c.block_size * c.seconds_per_token
            eviction = w.eviction * recompute_seconds * math.exp(-c.tail_age_seconds / w.eviction_age_seconds)
        memory = 0.0
        if w.memory_wait:
            excess = c.num_used_blocks + c.num_new_blocks - c.num_blocks
            if excess > 0:
                memory = w.memory_wait * excess * c.block_size * c.seconds_per_token
        num_waiting = c.num_waiting + len(c.held_seconds)
        return (
            c.queue_seconds + c.held_ahead_seconds,
            own,
            w.lost_capacity * own,
            own * (c.num_held_behind + w.delay_of_waiting * num_waiting + w.delay_of_running * c.num_running),
            eviction,
            memory,
        )
