"""Summarises a simulation as one row of figures, and combines the rows of several seeds."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from tools.simulate.fleet.fleet import ModelFleet
from tools.simulate.workload import Outcome, ShardSample, SimulationResult

WARM_UP_SHARE: Final = 0.1
"""The share of calls that arrive first and do not count, because they meet empty caches and short queues."""


class Slo(msgspec.Struct, frozen=True):
    """A service-level objective: both limits must be met."""

    ttft_seconds: float = 2.0
    tpot_seconds: float = 0.1
    """Mean time per output token after the first."""

    def is_met_by(self, outcome: Outcome) -> bool:
        return (
            not outcome.failed
            and outcome.ttft_seconds <= self.ttft_seconds
            and outcome.tpot_seconds <= self.tpot_seconds
        )


BATCH_SLO: Final = Slo(60.0, 0.2)
"""Batch calls should meet this: they may wait for a minute, and their tokens may come half as fast."""


class Statistics(msgspec.Struct, frozen=True):
    """Times in seconds, and shares, of the requests after the warm-up unless noted otherwise. Times are those of
    requests that did not fail. They are None if all failed."""

    hit_rate: float
    """Cached prompt tokens / prompt tokens of the whole run, because empty caches occur in real fleets too."""
    warm_hit_rate: float
    """The same after the warm-up."""
    ttft_mean: float | None
    ttft_p50: float | None
    ttft_p90: float | None
    ttft_p99: float | None
    tpot_mean: float | None
    goodput: float
    """The share of requests within the SLO. Failed ones are not."""
    goodput_per_second: float
    """Requests within the SLO per second of the time in which the requests arrived."""
    output_tokens_per_second: float
    """Output tokens of the requests that ended within that time, per second of it."""
    requests: int
    failed: int
    prefill_imbalance: float
    """Maximum / mean over the shards of the prompt tokens that they computed. 1 is even."""
    in_flight_imbalance: float | None
    """Maximum / mean over the shards of the sequences running or waiting, averaged over time. None without samples."""
    router_microseconds: float
    """CPU time in the router core per request."""
    waited_beside_idle: int = 0
    """Requests of the whole run that waited in a router beside an idle shard for longer than they may."""


def measured_outcomes(outcomes: Sequence[Outcome], num_measured_calls: int) -> list[Outcome]:
    """The first `num_measured_calls` outcomes by arrival, including the warm-up."""
    return sorted(outcomes, key=lambda outcome: (outcome.arrived_at, outcome.call.call_id))[:num_measured_calls]


def without_warm_up(outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
    """`outcomes` must be ordered by arrival."""
    return outcomes[int(len(outcomes) * WARM_UP_SHARE) :]


def summarise(result: SimulationResult, *, num_shards: int, num_measured_calls: int, slo: Slo) -> Statistics:
    everything = measured_outcomes(result.outcomes, num_measured_calls)
    outcomes = without_warm_up(everything)
    served = [outcome for outcome in outcomes if not outcome.failed]
    ttfts = sorted(outcome.ttft_seconds for outcome in served)
    tpots = [outcome.tpot_seconds for outcome in served if outcome.call.num_output_tokens > 1]
    window = (outcomes[0].arrived_at, outcomes[-1].arrived_at) if outcomes else (0.0, 0.0)
    seconds = window[1] - window[0]
    num_tokens = sum(outcome.call.num_output_tokens for outcome in served if outcome.finished_at <= window[1])
    return Statistics(
        hit_rate=hit_rate(everything),
        warm_hit_rate=hit_rate(outcomes),
        ttft_mean=_mean(ttfts),
        ttft_p50=quantile(ttfts, 0.50),
        ttft_p90=quantile(ttfts, 0.90),
        ttft_p99=quantile(ttfts, 0.99),
        tpot_mean=_mean(tpots),
        goodput=sum(map(slo.is_met_by, outcomes)) / max(len(outcomes), 1),
        goodput_per_second=sum(map(slo.is_met_by, outcomes)) / seconds if seconds else 0.0,
        output_tokens_per_second=num_tokens / seconds if seconds else 0.0,
        requests=len(outcomes),
        failed=len(outcomes) - len(served),
        prefill_imbalance=prefill_imbalance(served, num_shards),
        in_flight_imbalance=in_flight_imbalance(result.samples, num_shards, window),
        router_microseconds=1e6 * result.router_cpu_seconds / max(len(result.outcomes), 1),
        waited_beside_idle=result.num_waited_beside_idle,
    )


def summarise_models(
    result: SimulationResult, models: Sequence[ModelFleet], *, num_measured_calls: int, slo: Slo
) -> dict[str, Statistics]:
    """The figures of each model by itself. CPU time is the same for every request."""
    measured = measured_outcomes(result.outcomes, num_measured_calls)
    found: dict[str, Statistics] = {}
    first = 0
    for model in models:
        own = range(first, first + model.num_shards)
        first = own.stop
        outcomes = [
            dataclasses.replace(outcome, shard_index=outcome.shard_index - own.start)
            for outcome in measured
            if outcome.call.model == model.name
        ]
        samples = [
            dataclasses.replace(sample, shard_index=sample.shard_index - own.start)
            for sample in result.samples
            if sample.shard_index in own
        ]
        cpu_seconds = result.router_cpu_seconds * len(outcomes) / max(len(result.outcomes), 1)
        found[model.name] = summarise(
            SimulationResult(outcomes, samples, cpu_seconds, result.num_router_events),
            num_shards=model.num_shards,
            num_measured_calls=len(outcomes),
            slo=slo,
        )
    return found


def summarise_classes(
    result: SimulationResult, slos: Mapping[str, Slo], *, num_shards: int, num_measured_calls: int
) -> dict[str, Statistics]:
    """The figures of interactive and of batch calls by themselves, each class in `slos` with its own SLO. CPU time is
    the same for every request."""
    measured = measured_outcomes(result.outcomes, num_measured_calls)
    found: dict[str, Statistics] = {}
    for name, slo in slos.items():
        outcomes = [outcome for outcome in measured if outcome.call.is_batch == (name == "batch")]
        cpu_seconds = result.router_cpu_seconds * len(outcomes) / max(len(result.outcomes), 1)
        found[name] = summarise(
            SimulationResult(outcomes, (), cpu_seconds, result.num_router_events),
            num_shards=num_shards,
            num_measured_calls=len(outcomes),
            slo=slo,
        )
    return found


def hit_rate(outcomes: Sequence[Outcome]) -> float:
    served = [outcome for outcome in outcomes if not outcome.failed]
    num_prompt_tokens = sum(outcome.call.num_prompt_tokens for outcome in served)
    return sum(outcome.num_cached_tokens for outcome in served) / max(num_prompt_tokens, 1)


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """Interpolates linearly between the two nearest values. None for an empty sequence."""
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
    """Times at which nothing is in flight are left out."""
    in_flight: defaultdict[float, list[int]] = defaultdict(list)
    for sample in samples:
        if window[0] <= sample.at <= window[1]:
            in_flight[sample.at].append(sample.num_running + sample.num_waiting)
    return _mean([max(counts) * num_shards / sum(counts) for counts in in_flight.values() if any(counts)])


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def combine(policy: str, seeds: Sequence[Statistics]) -> dict[str, Any]:
    """Returns `{"policy", ...means of the fields of Statistics, "seeds", "spread"}`. The spread of each figure is half
    its range over the seeds. It is absent for a single seed. Means of counts are rounded to whole numbers."""
    rows = [msgspec.structs.asdict(one) for one in seeds]
    row: dict[str, Any] = {"policy": policy}
    spread: dict[str, float] = {}
    for field in rows[0]:
        values = [row[field] for row in rows if row[field] is not None]
        row[field] = _mean_of_figures(values)
        if values:
            spread[field] = (max(values) - min(values)) / 2
    row["seeds"] = len(rows)
    if len(rows) > 1:
        row["spread"] = spread
    return row


def _mean_of_figures(values: Sequence[float]) -> float | None:
    if not values:
        return None
    mean = statistics.fmean(values)
    return round(mean) if all(isinstance(value, int) for value in values) else mean
