"""Measures the data plane's workloads over fabrics of growing size: what more edges, routers and shards bring, and what
they cost."""

from __future__ import annotations

import asyncio
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from lab.bench.data_plane.client import drive
from lab.bench.data_plane.run import (
    BenchPlan,
    Layout,
    fabric_config,
    fabric_pids,
    figures_of,
    pace_of,
    report_of,
    warm_ups,
)
from lab.bench.data_plane.workloads import Workload
from lab.process_counters import cpu_microseconds, rss_bytes
from tools.supervisor.child_fabric import child_fabric

MAX_SHARD_PROCESSES: Final = 4
"""With more shards than this, all are simulated in one process: the cost of hundreds of processes is another question.
"""
IDLE_SECONDS: Final = 2.0
"""Long enough for several of the heartbeats and registry reads that happen once a second."""
GRID: Final = tuple(
    "1x1x1 1x1x2 1x1x4 2x1x2 2x2x2 4x1x4 1x4x4 2x2x4 4x4x4 1x1x16 1x1x64 1x1x256".split()  # noqa: SIM905
)
_PATTERN: Final = re.compile(r"(\d+)x(\d+)x(\d+)")


class Standing(msgspec.Struct, frozen=True):
    """The consumption of a fabric while it is idle."""

    ready_seconds: float
    """Time from the command until every router knows every shard."""
    cpu_us_per_second: dict[str, float]
    """CPU-microseconds per second by role, over all its processes."""
    rss_mb: dict[str, float]
    """Mean resident memory of one process, by role."""


def parse_layout(text: str) -> Layout:
    """Parse the numbers of edges, routers and shards, written as "2x2x4". Raises ValueError."""
    match = _PATTERN.fullmatch(text)
    counts = [int(count) for count in match.groups()] if match else [0]
    if not all(counts):
        raise ValueError(f"{text!r} is not EDGESxROUTERSxSHARDS, as 2x2x4")
    num_edges, num_routers, num_shards = counts
    return Layout(
        num_edges=num_edges,
        num_routers=num_routers,
        num_shards=num_shards,
        shards_per_process=1 if num_shards <= MAX_SHARD_PROCESSES else num_shards,
    )


def run_scale_out(
    plan: BenchPlan, layouts: Sequence[str], on_progress: Callable[[str], None] = lambda _: None
) -> list[dict[str, Any]]:
    """Return one report per layout: `layout`, `standing`, and `workloads` with a report of each. Every run measures all
    layouts, one after the other, each with a fresh fabric (one for each pace that the workloads need). Raises
    CommandError."""
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    standings: dict[str, list[Standing]] = {}
    plans = {name: msgspec.structs.replace(plan, layout=parse_layout(name)) for name in layouts}
    for run in range(plan.num_runs):
        for name, own in plans.items():
            for workloads in _by_fabric(plan.workloads):
                on_progress(f"{name}, run {run + 1} of {plan.num_runs}: {', '.join(w.name for w in workloads)}")
                standing, measured = asyncio.run(_measure(own, workloads, seed=1 + run))
                standings.setdefault(name, []).append(standing)
                for workload, figures in zip(workloads, measured, strict=True):
                    runs.setdefault((name, workload.name), []).append(figures)
    return [
        {
            "layout": name,
            "standing": _median(standings[name]),
            "workloads": [report_of(w, runs[name, w.name], own) for w in plan.workloads],
        }
        for name, own in plans.items()
    ]


async def _measure(plan: BenchPlan, workloads: Sequence[Workload], seed: int) -> tuple[Standing, list[dict[str, Any]]]:
    """Measure one fabric that is started for this."""
    with tempfile.TemporaryDirectory(prefix="kvloom-bench-") as home:
        data_dir = Path(home)
        began = time.monotonic()
        async with child_fabric(fabric_config(plan, workloads[0], data_dir), data_dir) as url:
            ready_seconds = time.monotonic() - began
            pids = fabric_pids(data_dir)
            if plan.is_warmed_up:
                for warm_up in warm_ups(workloads[0]):
                    await drive(plan.model, _once(warm_up), url, pids, seed=0)
            before = {role: cpu_microseconds(own) for role, own in pids.items()}
            await asyncio.sleep(IDLE_SECONDS)
            idle = {role: (cpu_microseconds(own) - before[role]) / IDLE_SECONDS for role, own in pids.items()}
            measured = [
                figures_of(workload, await drive(plan.model, _once(workload), url, pids, seed))
                for workload in workloads
            ]
            rss_mb = {role: rss_bytes(own) / 1e6 / len(own) for role, own in pids.items()}
    return Standing(ready_seconds, idle, rss_mb), measured


def _by_fabric(workloads: Sequence[Workload]) -> list[list[Workload]]:
    """Group workloads that need the same pace, so that they share a fabric. Workloads with answers of one token have no
    pace of their own."""
    paced = [pace_of(workload) for workload in workloads if workload.num_tokens > 1]
    groups: dict[tuple[float, int], list[Workload]] = {}
    for workload in workloads:
        pace = pace_of(workload) if workload.num_tokens > 1 or not paced else paced[0]
        groups.setdefault(pace, []).append(workload)
    # The fabric takes its pace from the first one.
    return [sorted(group, key=lambda workload: workload.num_tokens == 1) for group in groups.values()]


def _once(workload: Workload) -> Workload:
    """Play each long stream only once, since many fabrics are measured."""
    if workload.num_tokens == 1:
        return workload
    return msgspec.structs.replace(workload, num_requests=min(workload.num_requests, workload.num_streams))


def _median(standings: Sequence[Standing]) -> dict[str, Any]:
    def by_role(read: Callable[[Standing], dict[str, float]]) -> dict[str, float]:
        return {role: round(statistics.median(read(s)[role] for s in standings), 1) for role in read(standings[0])}

    return msgspec.structs.asdict(
        Standing(
            round(statistics.median(standing.ready_seconds for standing in standings), 1),
            by_role(lambda standing: standing.cpu_us_per_second),
            by_role(lambda standing: standing.rss_mb),
        )
    )
