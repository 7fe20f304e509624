"""What a simulation amounts to: one row of figures."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

import msgspec

from tools.simulate.workload import Outcome, ShardSample, SimulationResult

WARM_UP_SHARE: Final = 0.1
"""Of the calls, the first to arrive: they meet empty caches and short queues."""


class Slo(msgspec.Struct, frozen=True):
    """What counts as good. Both must hold."""

    ttft_seconds: float = 2.0
    tpot_seconds: float = 0.1
    """Mean of the request's output tokens behind the first."""

    def is_met_by(self, outcome: Outcome) -> bool:
        return (
            not outcome.failed
            and outcome.ttft_seconds <= self.ttft_seconds
            and outcome.tpot_seconds <= self.tpot_seconds
        )


class Statistics(msgspec.Struct, frozen=True):
    """Seconds and shares, of the requests behind the warm-up except where it says otherwise. Times are of those that
    did not fail, None when all did."""

    hit_rate: float
    """Cached prompt tokens / prompt tokens, of the whole run: an empty cache is part of what a fleet lives through."""
    warm_hit_rate: float
    """The same behind the warm-up."""
    ttft_mean: float | None
    ttft_p50: float | None
    ttft_p90: float | None
    ttft_p99: float | None
    tpot_mean: float | None
    goodput: float
    """Share of requests inside the SLO; failed ones are not."""
    requests: int
    failed: int
    prefill_imbalance: float
    """Most prompt tokens that one shard computed / mean over the shards; 1 is even."""
    in_flight_imbalance: float | None
    """Most sequences running or waiting on one shard / mean over the shards, averaged over time; None: no samples."""
    router_microseconds: float
    """CPU time in the router core for one request."""


def measured_outcomes(outcomes: Sequence[Outcome], num_measured_calls: int) -> list[Outcome]:
    """Those that count, by arrival: the first `num_measured_calls`, warm-up still among them."""
    return sorted(outcomes, key=lambda outcome: (outcome.arrived_at, outcome.call.call_id))[:num_measured_calls]


def without_warm_up(outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
    """`outcomes` by arrival."""
    return outcomes[int(len(outcomes) * WARM_UP_SHARE) :]


def summarise(result: SimulationResult, *, num_shards: int, num_measured_calls: int, slo: Slo) -> Statistics:
    everything = measured_outcomes(result.outcomes, num_measured_calls)
    outcomes = without_warm_up(everything)
    served = [outcome for outcome in outcomes if not outcome.failed]
    ttfts = sorted(outcome.ttft_seconds for outcome in served)
    tpots = [outcome.tpot_seconds for outcome in served if outcome.call.num_output_tokens > 1]
    window = (outcomes[0].arrived_at, outcomes[-1].arrived_at) if outcomes else (0.0, 0.0)
    return Statistics(
        hit_rate=hit_rate(everything),
        warm_hit_rate=hit_rate(outcomes),
        ttft_mean=_mean(ttfts),
        ttft_p50=quantile(ttfts, 0.50),
        ttft_p90=quantile(ttfts, 0.90),
        ttft_p99=quantile(ttfts, 0.99),
        tpot_mean=_mean(tpots),
        goodput=sum(map(slo.is_met_by, outcomes)) / max(len(outcomes), 1),
        requests=len(outcomes),
        failed=len(outcomes) - len(served),
        prefill_imbalance=prefill_imbalance(served, num_shards),
        in_flight_imbalance=in_flight_imbalance(result.samples, num_shards, window),
        router_microseconds=1e6 * result.router_cpu_seconds / max(len(result.outcomes), 1),
    )


def hit_rate(outcomes: Sequence[Outcome]) -> float:
    served = [outcome for outcome in outcomes if not outcome.failed]
    num_prompt_tokens = sum(outcome.call.num_prompt_tokens for outcome in served)
    return sum(outcome.num_cached_tokens for outcome in served) / max(num_prompt_tokens, 1)


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """Between the two nearest values, linearly. None of an empty sequence."""
    if not ordered:
        return None
    place = share * (len(ordered) - 1)
    below, above = math.floor(place), math.ceil(place)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def prefill_imbalance(served: Sequence[Outcome], num_shards: int) -> float:
    computed = [0] * num_shards
    for outcome in served:
        computed[outcome.shard_index] += outcome.call.num_prompt_tokens - outcome.num_cached_tokens
    total = sum(computed)
    return max(computed) * num_shards / total if total else 1.0


def in_flight_imbalance(samples: Sequence[ShardSample], num_shards: int, window: tuple[float, float]) -> float | None:
    """Moments when nothing is in flight say nothing and are left out."""
    in_flight: defaultdict[float, list[int]] = defaultdict(list)
    for sample in samples:
        if window[0] <= sample.at <= window[1]:
            in_flight[sample.at].append(sample.num_running + sample.num_waiting)
    return _mean([max(counts) * num_shards / sum(counts) for counts in in_flight.values() if any(counts)])


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
