"""ECT, estimated completion cost: the time to the request's first token, plus the delay that it causes to all others.

All terms are seconds of a shard's time, so that weights are few and dimensionless.
docs/notes/routing/policy-comparison.md describes how they were chosen, and how they do on other traces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

from router.core.placement.policy import Arrival, BacklogPolicy, Candidate, CostFloor, Policy


@dataclasses.dataclass(frozen=True, slots=True)
class EctWeights:
    """The weight of each term; they were chosen on traces (docs/concepts/routing.md)."""

    lost_capacity: float = 0.5
    """Prefill that a cache hit elsewhere would have saved is time that the fleet loses, whichever request has to wait
    for it."""
    delay_of_waiting: float = 1.0
    """The more requests wait there, the busier a shard is likely to be while this prefill runs."""
    delay_of_running: float = 0.05
    """Decoding sequences share their steps with this prefill."""
    delay_of_urgent: float = 2.0
    """Sequences of more urgent classes decode slower while this prefill runs beside them, and so do those that follow
    them to what is cached there. The weight is high because less urgent requests may wait: they gather on few shards,
    and leave the others undisturbed."""
    delay_of_coming: float = 0.5
    """Requests that will come for the prefixes cached there, while the shard is busy, wait for this prefill too. M/G/1:
    work delays all arrivals up to the end of the busy period, 1 / (1 - utilisation) times the queued work. Requests
    that are free to go elsewhere do not count, because they will."""
    eviction: float = 1.0
    """Time to compute evicted blocks again, times the probability that they will be requested."""
    memory_wait: float = 1.0
    """Time until running sequences have freed enough blocks."""
    memory_pressure: float = 2.0
    """The wait of those that come later and find fewer blocks."""
    decoding: float = 0.4
    """Time that decoding takes longer: it is spread over all tokens of several answers, where a wait for the first
    token is one pause."""


MAX_UTILISATION: Final = 0.9
"""Beyond it the busy period no longer decides."""
DEFAULT_HOLD: Final = BacklogPolicy(backlog_seconds=0.05, shared_backlog_seconds=0.5, backlog_tokens=1024, aging=0.1)


class Ect(Policy):
    """Estimated completion cost, in seconds of shard time."""

    terms = (
        "queue",
        "own_prefill",
        "lost_capacity",
        "delay_of_others",
        "delay_of_coming",
        "eviction",
        "memory",
        "memory_pressure",
        "decoding",
        "adapter",
    )

    def __init__(self, weights: EctWeights | None = None, hold: BacklogPolicy | None = DEFAULT_HOLD) -> None:
        self._weights = weights or EctWeights()
        self.hold = hold
        w = self._weights
        self.floor = CostFloor(1.0 + w.lost_capacity, w.delay_of_waiting, w.delay_of_running)

    def costs(self, arrival: Arrival, candidates: Sequence[Candidate]) -> list[tuple[float, ...]]:
        return [self._cost(candidate) for candidate in candidates]

    def _cost(self, c: Candidate) -> tuple[float, ...]:
        w = self._weights
        own = c.own_seconds
        if c.held_seconds:
            num_waiting = c.num_waiting + len(c.held_seconds)
            held_ahead_seconds, num_held_behind = c.held_ahead_seconds, c.num_held_behind
        else:
            num_waiting = c.num_waiting
            held_ahead_seconds, num_held_behind = c.held_before_seconds, c.num_held_less_urgent
        num_coming = c.bound_arrival_rate * (c.queue_seconds + own / 2) / (1 - min(c.utilisation, MAX_UTILISATION))
        # Every computed block evicts one that would take about as long to compute again.
        num_lost_blocks = c.num_evicted_blocks * c.reuse_probability if c.num_evicted_blocks else 0.0
        return (
            c.queue_seconds - c.yielding_seconds + held_ahead_seconds,
            own,
            w.lost_capacity * own,
            own
            * (
                num_held_behind
                + w.delay_of_waiting * num_waiting
                + w.delay_of_running * (c.num_running - c.num_beyond_parts)
                + w.delay_of_urgent * c.num_urgent
            ),
            own * w.delay_of_coming * num_coming,
            own * w.eviction * num_lost_blocks / c.num_new_blocks if num_lost_blocks else 0.0,
            w.memory_wait * c.memory_wait_seconds,
            w.memory_pressure * c.memory_pressure_seconds,
            w.decoding * c.decode_delay_seconds,
            c.adapter_wait_seconds,
        )
