"""Runs the data plane's workloads against fabrics of real processes and reduces the measurements to figures."""

from __future__ import annotations

import asyncio
import math
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from kvloom_common.config import KvloomConfig, ModelConfig
from lab.bench.data_plane.client import drive
from lab.bench.data_plane.workloads import Workload
from tools.supervisor.child_fabric import child_fabric
from tools.supervisor.state import RunFolder

OURS: Final = ("edge", "router", "safety")
"""The roles between client and engine."""
MAX_SHARD_PROCESSES: Final = 4
GATEWAY: Final = "gateway"
"""The role of another gateway's processes."""
_COUNTED: Final = (*OURS, "orchestrator", GATEWAY)
_WARM_UP: Final = (
    Workload(name="", about="", num_streams=32, num_requests=400, num_tokens=1, step_ms=0.0),
    Workload(name="", about="", num_streams=16, num_requests=32, num_tokens=64, step_ms=0.0),
)


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """The number of processes of each role."""

    num_edges: int = 1
    num_routers: int = 1
    num_shards: int = 2
    """More than MAX_SHARD_PROCESSES are simulated by one process: the cost of hundreds of processes is another
    question."""
    colocate: bool = False


class BenchPlan(msgspec.Struct, frozen=True, kw_only=True):
    model: ModelConfig
    workloads: Sequence[Workload]
    num_runs: int = 3
    layout: Layout = Layout()
    with_safety: bool = True
    is_warmed_up: bool = True


def run_bench(plan: BenchPlan, on_progress: Callable[[str], None] = lambda _: None) -> list[dict[str, Any]]:
    """Return one report per workload. Workloads that need the same pace of the engine share a fabric and are measured
    alternately. Raises CommandError."""
    reports: list[dict[str, Any]] = []
    paces = dict.fromkeys(map(pace_of, plan.workloads))
    for pace in paces:
        workloads = [workload for workload in plan.workloads if pace_of(workload) == pace]
        reports += asyncio.run(_run_on_fresh_fabric(plan, workloads, on_progress))
    return reports


async def _run_on_fresh_fabric(
    plan: BenchPlan, workloads: Sequence[Workload], on_progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    data_dir = Path(tempfile.mkdtemp(prefix="kvloom-bench-"))
    runs: dict[str, list[dict[str, Any]]] = {workload.name: [] for workload in workloads}
    is_log_wanted = True
    try:
        on_progress(f"starting a fabric (engine step {workloads[0].step_ms:g} ms)")
        async with child_fabric(fabric_config(plan, workloads[0], data_dir), data_dir) as url:
            pids = fabric_pids(data_dir)
            if plan.is_warmed_up:
                for warm_up in warm_ups(workloads[0]):
                    await drive(plan.model, warm_up, url, pids, seed=0)
            for run in range(plan.num_runs):
                for workload in workloads:
                    on_progress(f"{workload.name}, run {run + 1} of {plan.num_runs}: {workload.about}")
                    raw = await drive(plan.model, workload, url, pids, seed=1 + run)
                    runs[workload.name].append(figures_of(workload, raw))
        is_log_wanted = False
    finally:
        if not is_log_wanted:
            shutil.rmtree(data_dir, ignore_errors=True)
    return [report_of(workload, runs[workload.name], plan) for workload in workloads]


def warm_ups(first: Workload) -> Sequence[Workload]:
    """The workloads that warm up a fabric before `first` is measured: without streams of many tokens where tokens are
    slow."""
    return _WARM_UP if first.decode_every == 1 else _WARM_UP[:1]


def pace_of(workload: Workload) -> tuple[float, int]:
    """The engine's pace for a workload. Workloads with the same pace can share a fabric."""
    return workload.step_ms, workload.decode_every


def fabric_config(plan: BenchPlan, workload: Workload, data_dir: Path) -> KvloomConfig:
    """A configuration in which the engine delays a request only by its steps: it has room for all, and prefill takes no
    time."""
    config = KvloomConfig(model=plan.model)
    config.router.max_queued_requests = 8192
    config.shard.engine = "sim"
    config.edge.num_edges, config.edge.colocate = plan.layout.num_edges, plan.layout.colocate
    config.router.num_routers = plan.layout.num_routers
    num_shards = config.shard.num_shards = plan.layout.num_shards
    config.shard.sim.shards_per_process = num_shards if num_shards > MAX_SHARD_PROCESSES else 1
    config.shard.max_batch = 4096
    config.shard.num_blocks = 65_536
    config.shard.max_prefill_tokens_per_step = 1 << 20
    config.shard.sim.step_ms = workload.step_ms
    config.shard.sim.decode_every = workload.decode_every
    config.shard.sim.prefill_tokens_per_second = 1e9
    config.shard.sim.stamp_tokens = True
    if not plan.with_safety:
        config.safety.answer_mode = "off"
        policy_path = data_dir / "no-rules.toml"
        policy_path.write_text("")
        config.safety.policy_file = str(policy_path)
    return config


def fabric_pids(data_dir: Path) -> dict[str, list[int]]:
    pids: dict[str, list[int]] = {}
    for process in RunFolder(data_dir).require_running().processes:
        if process.pid is not None:
            pids.setdefault(process.role, []).append(process.pid)
    return pids


def figures_of(workload: Workload, raw: dict[str, Any]) -> dict[str, Any]:
    """Reduce the raw figures of one run. Costs per request count requests that were answered in full; memory is the
    growth per stream."""
    num_requests = max(1, raw["num_complete"])
    num_tokens = num_requests * workload.num_tokens
    cpu_us = raw["cpu_us"] | {"sum": sum(raw["cpu_us"].get(role, 0.0) for role in _COUNTED)}
    switches = raw["switches"] | {"sum": sum(raw["switches"].get(role, 0) for role in _COUNTED)}
    rss = sum(raw["rss_bytes"].get(role, 0) for role in _COUNTED)
    return {
        "cpu_us_per_token": {role: round(value / num_tokens, 3) for role, value in cpu_us.items()},
        "cpu_us_per_request": {role: round(value / num_requests, 2) for role, value in cpu_us.items()},
        "switches_per_token": {role: round(value / num_tokens, 4) for role, value in switches.items()},
        "added_ttft_ms": _percentiles_ms(raw["first_token_seconds"]),
        "transit_ms": _percentiles_ms(raw["transit_seconds"]),
        "tokens_per_second": round(num_tokens / raw["wall_seconds"], 1),
        "requests_per_second": round(num_requests / raw["wall_seconds"], 1),
        "events_per_read": round(raw["num_events"] / max(1, raw["num_reads"]), 2),
        "rss_kb_per_stream": round(rss / 1000 / workload.num_streams, 2),
        "client_cpu_us_per_token": round(raw["client_cpu_us"] / num_tokens, 3),
        "requests": raw["num_complete"],
        "num_errors": raw["num_errors"],
        "errors": raw["errors"],
    }


def _percentiles_ms(ordered: Sequence[float]) -> dict[str, float | None]:
    def at(share: float) -> float | None:
        return round(1e3 * ordered[max(0, math.ceil(share * len(ordered)) - 1)], 3) if ordered else None

    return {"p50": at(0.50), "p99": at(0.99)}


def report_of(workload: Workload, runs: Sequence[dict[str, Any]], plan: BenchPlan) -> dict[str, Any]:
    """Return the median of every figure over the runs, its `spread` (highest less lowest) and the runs. Of memory, the
    highest is taken, because a run reuses memory that the run before has left."""
    return {
        "workload": workload.name,
        "about": workload.about,
        "layout": msgspec.structs.asdict(plan.layout),
        "safety": plan.with_safety,
        "num_runs": len(runs),
        **_merged(runs, statistics.median),
        "rss_kb_per_stream": max(run["rss_kb_per_stream"] for run in runs),
        "num_errors": sum(run["num_errors"] for run in runs),
        "spread": _merged(runs, lambda values: max(values) - min(values)),
        "runs": list(runs),
    }


def _merged(runs: Sequence[dict[str, Any]], reduce: Callable[[Sequence[float]], float]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for name, value in runs[0].items():
        if name == "errors":
            continue
        if isinstance(value, dict):
            merged[name] = {key: _reduced((run[name].get(key) for run in runs), reduce) for key in value}
        else:
            merged[name] = _reduced((run[name] for run in runs), reduce)
    return merged


def _reduced(values: Iterable[float | None], reduce: Callable[[Sequence[float]], float]) -> float | None:
    known = [value for value in values if value is not None]
    return round(reduce(known), 4) if known else None
