"""`kvloom-lab bench autoscaling`: a day's load on fleets whose size others' laws or kvloom's policy decides."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from lab.bench.autoscaling_laws import BusyShareLaw, FixedFleet, KvloomLaw, LatencyLaw
from lab.bench.experiment import Column, Report, TableOf, experiment, show_progress
from lab.bench.modelled import Lengths, RandomCalls, percentile, router_core
from lab.flags import count, number
from tools.simulate.fleet.fleet import FleetOptions
from tools.simulate.fleet.profile import Profile
from tools.simulate.fleet.scaling import FleetScaler
from tools.simulate.statistics import Slo
from tools.simulate.world import simulate

DAY_SECONDS: Final = 86_400.0
_PHASE_SECONDS: Final = 300.0
_NIGHT_SHARE: Final = 0.15
"""The rate at the quietest time, as a share of that at the busiest."""
_BURST_FACTOR: Final = 1.6
_BURSTS: Final = ((9.0, 9.25), (13.5, 13.75), (20.0, 20.5))
"""Hours of the day in which the rate jumps, as after a meeting or a campaign."""

SMALL_GPU: Final = Profile(
    name="8b-l4",
    step_floor_seconds=0.0375,
    seconds_per_prefill_token=2.95e-4,
    seconds_per_attention_pair=4 * 32 * 4096 / (121e12 * 0.4),
    seconds_per_context_token=131072 / (300e9 * 0.75),
    chunk_tokens=1024,
    capacity_tokens=100_000,
    max_batch=128,
)
"""A model of 8 billion parameters, in 8 bits, on an NVIDIA L4 by its datasheet (121e12 FLOPS, 300e9 bytes/s, 24 GB);
the utilisations are assumptions. Such fleets have few enough requests for a day to be simulated in minutes."""
LENGTHS: Final = Lengths("lengths", 1155.0, 211.0, 8192, 1024)
"""Their means are those of the conversations in Azure's trace of 2023."""


class DayPlan(msgspec.Struct, frozen=True, kw_only=True):
    peak_rate: float
    max_shards: int
    hours: float
    start_seconds: float
    slo: Slo
    seed: int


class DayRow(msgspec.Struct, frozen=True, kw_only=True):
    law: str
    shard_hours: float
    in_slo: float
    """The share of requests within the SLO."""
    ttft_p50: float | None
    ttft_p99: float | None
    least_shards: int
    most_shards: int
    num_changes: int
    num_requests: int
    num_failed: int


def rates(plan: DayPlan) -> list[tuple[float, float, float]]:
    """(begin, end, requests per second) through the day: a wave with its peak at 15 h, and three bursts."""
    phases: list[tuple[float, float, float]] = []
    at = 0.0
    while at < plan.hours * 3600.0:
        hour = at / 3600.0
        wave = 0.5 * (1 - math.cos(2 * math.pi * (hour - 3.0) / 24.0))
        share = _NIGHT_SHARE + (1 - _NIGHT_SHARE) * wave
        if any(begin <= hour < end for begin, end in _BURSTS):
            share *= _BURST_FACTOR
        phases.append((at, at + _PHASE_SECONDS, plan.peak_rate * share))
        at += _PHASE_SECONDS
    return phases


def run_day(law: str, scaler: FleetScaler, plan: DayPlan) -> DayRow:
    options = FleetOptions(
        profile=SMALL_GPU,
        num_shards=plan.max_shards,
        seed=plan.seed,
        sample_interval_seconds=DAY_SECONDS,
        core_config=router_core(max_queued_requests=10**6, max_queue_seconds=600.0),
        scaler=scaler,
    )
    result = simulate(RandomCalls(rates(plan), LENGTHS, plan.seed), options)
    ttfts = [one.ttft_seconds for one in result.outcomes if not one.failed]
    counts = [number for _, number in result.shard_counts]
    return DayRow(
        law=law,
        shard_hours=result.shard_seconds / 3600.0,
        in_slo=sum(map(plan.slo.is_met_by, result.outcomes)) / max(1, len(result.outcomes)),
        ttft_p50=percentile(ttfts, 0.5),
        ttft_p99=percentile(ttfts, 0.99),
        least_shards=min(counts),
        most_shards=max(counts),
        num_changes=sum(one != other for one, other in itertools.pairwise(counts)),
        num_requests=len(result.outcomes),
        num_failed=len(result.outcomes) - len(ttfts),
    )


LAWS: Final[Mapping[str, Callable[[DayPlan], FleetScaler]]] = {
    "fixed": lambda plan: FixedFleet(plan.max_shards),
    "HPA": lambda plan: BusyShareLaw(plan.start_seconds),
    "llm-d": lambda plan: LatencyLaw(plan.start_seconds, plan.slo),
    "kvloom": lambda plan: KvloomLaw(plan.start_seconds, plan.slo),
}
_COLUMNS: Final[Sequence[Column]] = (
    Column("law", "law", is_left=True),
    Column("hours", "shard_hours", ".1f"),
    Column("in SLO", "in_slo", ".2%"),
    Column("TTFT p50", "ttft_p50", ".2f"),
    Column("p99", "ttft_p99", ".2f"),
    Column("least", "least_shards"),
    Column("most", "most_shards"),
    Column("moves", "num_changes"),
    Column("failed", "num_failed"),
)


@experiment(
    "autoscaling",
    number("--peak-rate", 5.0, "Requests per second at the busiest time, bursts apart.", above=True),
    count("--max-shards", 8, "The fixed fleet, and the most that the others may have."),
    number("--hours", 24.0, "How much of the day is played, from midnight on.", above=True, most=24),
    number("--start-seconds", 120.0, "How long a shard takes to start."),
    number("--ttft-seconds", 2.0, "The objective for first tokens.", above=True),
    number("--tpot-seconds", 0.1, "The objective for the time per token after the first.", above=True),
    count("--seed", 1, "Of the requests.", least=0),
)
def bench_autoscaling(ttft_seconds: float, tpot_seconds: float, **settings: Any) -> Report:
    """Play a day's load on modelled shards behind the real router core, with each law that decides how many there are:
    a fixed fleet, the share of time in which shards are busy as an autoscaler of CPUs takes it, llm-d's law of
    latencies, and kvloom's policy."""
    plan = DayPlan(slo=Slo(ttft_seconds, tpot_seconds), **settings)
    rows: list[DayRow] = []
    for law, make in LAWS.items():
        rows.append(run_day(law, make(plan), plan))
        show_progress(f"{law}: {rows[-1].shard_hours:.1f} shard-hours, {rows[-1].in_slo:.2%} in SLO")
    title = (
        f"Shard-hours in {plan.hours:g} hours, {rows[0].num_requests:,} requests, at most {plan.max_shards} shards of "
        f"{SMALL_GPU.name}, SLO {ttft_seconds:g} s and {1e3 * tpot_seconds:g} ms a token"
    )
    return Report(rows, [TableOf(_COLUMNS, rows, title)])
