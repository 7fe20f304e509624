"""Compares two variants of one workload by measuring them alternately: the cost of the answers' safety gate, the effect
of other clients' long prompts on a stream, the benefit of event loops that stay on one CPU, and the costs of tool
calls, of an orchestrator that runs, and of answers that it stores."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from kvloom_common.config import KvloomConfig
from lab.bench.data_plane.client import drive
from lab.bench.data_plane.run import BenchPlan, fabric_config, fabric_pids, figures_of, report_of, warm_ups
from lab.bench.data_plane.workloads import Workload, beside_long_prompts
from tools.supervisor.child_fabric import child_fabric

GATE: Final = "gate"
LONG_PROMPTS: Final = "long-prompts"
CPUS: Final = "cpus"
TOOL_CALLS: Final = "tool-calls"
ORCHESTRATOR: Final = "orchestrator"
STORE: Final = "store"
COMPARISONS: Final = (GATE, LONG_PROMPTS, CPUS, TOOL_CALLS, ORCHESTRATOR, STORE)
_TOOL: Final = "take_note"
_CALL: Final = '<tool_call>\n{"name": "take_note", "arguments": {"text": "'
"""How the family `hermes` begins a call; what follows is the argument."""
_SETTLE_SECONDS: Final = 1.0

Measure = Callable[[Workload, int], Any]
"""Measures a workload with a seed, and returns the client's figures."""
Variants = Callable[[BenchPlan, Workload, Path], contextlib.AbstractAsyncContextManager[Mapping[str, Measure]]]
"""Starts the variants of a workload, in a directory for the fabrics' files. The first variant is the reference."""


def run_by_turns(comparison: str, plan: BenchPlan, on_progress: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return one comparison per workload: a report of each variant, and the `difference` of the second from the first,
    the median over pairs of runs. Raises CommandError."""
    return [asyncio.run(_compare(comparison, plan, workload, on_progress)) for workload in plan.workloads]


async def _compare(
    comparison: str, plan: BenchPlan, workload: Workload, on_progress: Callable[[str], None]
) -> dict[str, Any]:
    runs: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="kvloom-bench-") as home:
        async with _VARIANTS[comparison](plan, workload, Path(home)) as measures:
            for run in range(plan.num_runs):
                for name, measure in measures.items():
                    on_progress(f"{workload.name}, run {run + 1} of {plan.num_runs}: {name}")
                    raw = await measure(workload, 1 + run)
                    runs.setdefault(name, []).append(figures_of(workload, raw))
                    await asyncio.sleep(_SETTLE_SECONDS)
    without, with_it = runs
    return {
        "comparison": comparison,
        "workload": workload.name,
        "variants": {name: report_of(workload, own, plan) for name, own in runs.items()},
        "difference": _differences(runs[without], runs[with_it]),
    }


def _gate(config: KvloomConfig, is_on: bool) -> None:
    config.safety.answer_mode = "gate" if is_on else "off"


def _stay_on_cpus(config: KvloomConfig, is_on: bool) -> None:
    config.fabric.is_pinned_to_cpu = is_on


def _orchestrate(config: KvloomConfig, is_on: bool) -> None:
    config.orchestrator.enabled = is_on


def _settings(off: str, on: str, switch: Callable[[KvloomConfig, bool], None]) -> Variants:
    """Two fabrics with different settings that run at the same time."""

    @contextlib.asynccontextmanager
    async def variants(plan: BenchPlan, workload: Workload, home: Path) -> AsyncIterator[Mapping[str, Measure]]:
        async with contextlib.AsyncExitStack() as stack:
            measures: dict[str, Measure] = {}
            for is_on, name in enumerate((off, on)):
                config = fabric_config(plan, workload, home)
                switch(config, bool(is_on))
                fabric = _fabric(plan, workload, config, home / f"fabric-{is_on}")
                measures[name] = await stack.enter_async_context(fabric)
            yield measures

    return variants


@contextlib.asynccontextmanager
async def _long_prompt_variants(
    plan: BenchPlan, workload: Workload, home: Path
) -> AsyncIterator[Mapping[str, Measure]]:
    async with _fabric(plan, workload, fabric_config(plan, workload, home), home / "fabric") as measure:
        yield {
            "alone": measure,
            "beside long prompts": lambda workload, seed: measure(beside_long_prompts(workload), seed),
        }


@contextlib.asynccontextmanager
async def _tool_call_variants(plan: BenchPlan, workload: Workload, home: Path) -> AsyncIterator[Mapping[str, Measure]]:
    """The same words as text, and as the argument of a call that is streamed."""
    calls = fabric_config(plan, workload, home)
    calls.shard.sim.opening, calls.model.tool_parser = _CALL, "hermes"
    async with (
        _fabric(plan, workload, fabric_config(plan, workload, home), home / "fabric-text") as text,
        _fabric(plan, workload, calls, home / "fabric-calls") as call,
    ):
        yield {
            "text": text,
            "tool calls": lambda workload, seed: call(msgspec.structs.replace(workload, tools=(_TOOL,)), seed),
        }


@contextlib.asynccontextmanager
async def _store_variants(plan: BenchPlan, workload: Workload, home: Path) -> AsyncIterator[Mapping[str, Measure]]:
    config = fabric_config(plan, workload, home)
    _orchestrate(config, True)
    async with _fabric(plan, workload, config, home / "fabric") as measure:
        yield {
            "not stored": measure,
            "stored": lambda workload, seed: measure(msgspec.structs.replace(workload, is_stored=True), seed),
        }


@contextlib.asynccontextmanager
async def _fabric(plan: BenchPlan, workload: Workload, config: KvloomConfig, data_dir: Path) -> AsyncIterator[Measure]:
    """A fabric that has been warmed up."""
    data_dir.mkdir()  # noqa: ASYNC240  (nothing else runs here)
    async with child_fabric(config, data_dir) as url:

        async def measure(workload: Workload, seed: int) -> dict[str, Any]:
            return await drive(plan.model, workload, url, fabric_pids(data_dir), seed)

        if plan.is_warmed_up:
            for warm_up in warm_ups(workload):
                await measure(warm_up, 0)
        yield measure


def _differences(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> dict[str, Any]:
    def median_of(read: Callable[[dict[str, Any]], float | None]) -> float | None:
        pairs = [(read(one), read(other)) for one, other in zip(before, after, strict=True)]
        known = [other - one for one, other in pairs if one is not None and other is not None]
        return round(statistics.median(known), 3) if known else None

    return {
        "cpu_us_per_token": median_of(lambda run: run["cpu_us_per_token"]["sum"]),
        "added_ttft_ms": {p: median_of(lambda run, p=p: run["added_ttft_ms"][p]) for p in ("p50", "p99")},
        "transit_ms": {p: median_of(lambda run, p=p: run["transit_ms"][p]) for p in ("p50", "p99")},
    }


_VARIANTS: Final[Mapping[str, Variants]] = {
    GATE: _settings("answers not screened", "answers gated", _gate),
    CPUS: _settings("on any CPU", "event loops stay on one", _stay_on_cpus),
    LONG_PROMPTS: _long_prompt_variants,
    TOOL_CALLS: _tool_call_variants,
    ORCHESTRATOR: _settings("no orchestrator", "an orchestrator", _orchestrate),
    STORE: _store_variants,
}
