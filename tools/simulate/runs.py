"""Simulations and capacity searches as values that can be sent to another process."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

import msgspec

from tools.simulate.bound import simulate_bound
from tools.simulate.calibration import Calibration, calibrate
from tools.simulate.capacity import find_capacity
from tools.simulate.decisions import read_decision_log
from tools.simulate.fleet.fleet import ModelFleet
from tools.simulate.fleet.profile import Profile
from tools.simulate.pool import simulate_pool
from tools.simulate.statistics import (
    BATCH_SLO,
    Slo,
    Statistics,
    measured_outcomes,
    summarise,
    summarise_classes,
    summarise_models,
    without_warm_up,
)
from tools.simulate.traces import (
    MAX_THINK_SECONDS,
    MeasuredWorkload,
    MixedWorkload,
    ModelWorkload,
    Trace,
    TraceFormat,
    read_trace,
)
from tools.simulate.traces.reading import ReadFraction
from tools.simulate.workload import ShardSample, SimulationResult
from tools.simulate.world import FleetOptions, simulate

BOUND: Final = "bound"
POOL: Final = "pool"
"""Used in place of a policy name for the bounds: bound.py and pool.py."""
MAX_TIMELINE_POINTS: Final = 500

EngineOrder = Literal["fcfs", "shortest_prefill"]
ProgressCallback = Callable[[str, float], None]
"""Called with the current activity and the completed share of it."""


class TraceSource(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    format: TraceFormat | Literal["decisions"]
    block_size: int | None = None
    max_think_seconds: float = MAX_THINK_SECONDS


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one simulation depends on."""

    trace: TraceSource
    load: float
    """A multiple of the recorded rate, or the number of users of a closed loop."""
    policy: str
    """A placement policy of kvloom or of a plugin, BOUND or POOL."""
    profile: Profile
    num_shards: int
    """The number of shards of all models together."""
    models: tuple[ModelFleet, ...] = ()
    """Several models. () means one, with `num_shards`, `profile` and `capacity_blocks`."""
    model_shares: tuple[float, ...] = ()
    """The share of the sessions of each model. () means that the trace names the models."""
    seed: int = 0
    max_requests: int | None = None
    num_routers: int = 1
    capacity_blocks: int | None = None
    staleness_seconds: float = 0.0
    engine_order: EngineOrder = "fcfs"
    peer_fetch_bytes_per_second: float = 0.0
    speed_factors: tuple[float, ...] = ()
    slo: Slo = Slo()
    batch_share: float = 0.0
    """The share of batch calls that are added to the trace."""
    batch_slo: Slo = BATCH_SLO
    has_classes: bool = True
    """True when routers and shards are told which calls are batch."""
    with_curves: bool = False


class CapacitySpec(msgspec.Struct, frozen=True, kw_only=True):
    """A search for the highest load with sufficient goodput, averaged over the seeds. It begins at `run.load`."""

    run: RunSpec
    seeds: tuple[int, ...]


class Curves(msgspec.Struct, frozen=True):
    """The data of a plot."""

    ttfts: list[float]
    """Ascending, without the warm-up."""
    samples: list[ShardSample]


class RunReport(msgspec.Struct, frozen=True):
    statistics: Statistics
    """The statistics of all models together."""
    models: dict[str, Statistics] = {}
    """The statistics of each model, if there are several."""
    classes: dict[str, Statistics] = {}
    """The statistics of each class of requests, if batch calls were added."""
    calibration: dict[str, Calibration] = {}
    """How well predictions came true, by term."""
    curves: Curves | None = None


class CapacityReport(msgspec.Struct, frozen=True):
    capacity: float
    runs: list[RunReport]
    """The run of each seed at that load."""


def perform_run(spec: RunSpec, report_progress: ProgressCallback) -> RunReport:
    """Raises CommandError for a bad trace."""
    trace = _read_once(spec.trace, report_progress)
    workload: MeasuredWorkload = trace.workload(spec.load, spec.seed, spec.max_requests)
    if spec.batch_share:
        workload = MixedWorkload(workload, spec.batch_share, spec.seed)
    if spec.models:
        workload = ModelWorkload(workload, [model.name for model in spec.models], spec.model_shares)
    num_calls = max(workload.num_measured_calls, 1)

    def on_progress(num_ended: int) -> None:
        report_progress("", min(1.0, num_ended / num_calls))

    options = _fleet_options(spec)
    if spec.policy == BOUND:
        result = simulate_bound(workload, options.parts, on_progress)
    elif spec.policy == POOL:
        result = simulate_pool(workload, options.parts, on_progress)
    else:
        result = simulate(workload, options, on_progress)
    num_measured_calls = workload.num_measured_calls
    slos = {"interactive": spec.slo, "batch": spec.batch_slo} if spec.batch_share else {}
    summary = summarise(result, num_shards=spec.num_shards, num_measured_calls=num_measured_calls, slo=spec.slo)
    by_class = summarise_classes(result, slos, num_shards=spec.num_shards, num_measured_calls=num_measured_calls)
    by_model = summarise_models(result, spec.models, num_measured_calls=num_measured_calls, slo=spec.slo)
    calibration = calibrate(without_warm_up(measured_outcomes(result.outcomes, num_measured_calls)))
    curves = _curves(result, num_measured_calls) if spec.with_curves else None
    return RunReport(summary, by_model, by_class, calibration, curves)


def perform_capacity(spec: CapacitySpec, report_progress: ProgressCallback) -> CapacityReport:
    """Raises CommandError for a bad trace, or if there is no such load."""
    runs_at: dict[float, list[RunReport]] = {}
    is_closed_loop = _read_once(spec.run.trace, report_progress).is_closed_loop

    def goodput_at(load: float) -> float:
        runs_at[load] = [
            perform_run(
                msgspec.structs.replace(spec.run, load=load, seed=seed),
                lambda text, share: report_progress(text or f"at {load:.4g}", share),
            )
            for seed in spec.seeds
        ]
        return statistics.fmean(run.statistics.goodput for run in runs_at[load])

    capacity = find_capacity(goodput_at, spec.run.load, whole_numbers=is_closed_loop)
    return CapacityReport(capacity, runs_at[capacity])


def _read_once(source: TraceSource, report_progress: ProgressCallback) -> Trace:
    """Read a trace, or return it from memory if it is the last one that was read. A process runs many simulations of
    the same trace."""
    if source not in _last_trace:
        report_progress("reading", 0.0)
        trace = _read(source, lambda share: report_progress("reading", share))
        _last_trace.clear()
        _last_trace[source] = trace
    return _last_trace[source]


def _read(source: TraceSource, on_fraction: ReadFraction) -> Trace:
    path = Path(source.path)
    if source.format == "decisions":
        return read_decision_log(path, on_fraction).trace
    return read_trace(
        path,
        source.format,
        block_size=source.block_size,
        max_think_seconds=source.max_think_seconds,
        on_fraction=on_fraction,
    )


_last_trace: dict[TraceSource, Trace] = {}


def _fleet_options(spec: RunSpec) -> FleetOptions:
    return FleetOptions(
        profile=spec.profile,
        num_shards=spec.num_shards,
        models=spec.models,
        policy=spec.policy,
        seed=spec.seed,
        num_routers=spec.num_routers,
        capacity_blocks=spec.capacity_blocks,
        staleness_seconds=spec.staleness_seconds,
        engine_order=spec.engine_order,
        peer_fetch_bytes_per_second=spec.peer_fetch_bytes_per_second,
        speed_factors=spec.speed_factors,
        has_classes=spec.has_classes,
    )


def _curves(result: SimulationResult, num_measured_calls: int) -> Curves:
    outcomes = without_warm_up(measured_outcomes(result.outcomes, num_measured_calls))
    ttfts = sorted(outcome.ttft_seconds for outcome in outcomes if not outcome.failed)
    moments = sorted({sample.at for sample in result.samples})
    kept = set(moments[:: max(1, -(-len(moments) // MAX_TIMELINE_POINTS))])
    return Curves(ttfts, [sample for sample in result.samples if sample.at in kept])
