"""`kvloom-lab bench tenants`: the CPU time that keys, limits, metering and prices take, per request and per token."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from kvloom_common.config import ModelConfig
from lab.bench.data_plane.run import BenchPlan, Layout, figures_of, warm_ups
from lab.bench.data_plane.workloads import Workload
from lab.bench.tenants.paired import differences, estimate
from lab.bench.tenants.router_path import measure_router_path, router_path_table
from lab.bench.tenants.variants import ABOUT, OFF, Variant, variants
from shard_server.engines.torch_engine.checkpoint.converted_model import BUILTIN_MODEL_NAME
from tools.failures import CommandError
from tools.models.resolve import resolve_model
from tools.options import DEFAULT_DATA_DIR, data_dir_option, option

SHORT: Final = Workload(
    name="short", about="one-token answers, 32 at a time", num_streams=32, num_requests=800, num_tokens=1, step_ms=0.0
)
LONG: Final = Workload(
    name="long", about="answers of 128 tokens, 16 at a time", num_streams=16, num_requests=96, num_tokens=128,
    step_ms=0.0,
)  # fmt: skip
_FIELDS: Final[Mapping[str, Workload]] = {"cpu_us_per_request": SHORT, "cpu_us_per_token": LONG}
"""The measured figures, with the workload of each."""
_TITLES: Final = {"cpu_us_per_request": "CPU-us a request", "cpu_us_per_token": "CPU-us a token"}
_SHOWN_ROLES: Final = ("edge", "router", "safety", "control", "redis")

_Runs = dict[str, dict[str, list[dict[str, Any]]]]
"""Field of the report → variant → the figures of each round."""


@click.command()
@option(
    "--rounds",
    "num_rounds",
    type=click.IntRange(1, 1000),
    default=8,
    show_default=True,
    scope="bench-tenants",
    help="Each measures all variants, every other one in the opposite order. From six on, intervals have 95%.",
)
@option(
    "--max-seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=240.0,
    show_default=True,
    scope="bench-tenants",
    help="After this time no further round begins.",
)
@option(
    "--scale",
    type=click.FloatRange(min=0, max=1, min_open=True),
    default=1.0,
    show_default=True,
    scope="bench-tenants",
    help="Share of the streams and requests.",
)
@option(
    "--in-process",
    is_flag=True,
    scope="bench-tenants",
    help="Only the router's path, repeated in this process without sockets.",
)
@data_dir_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def bench_tenants(
    num_rounds: int, max_seconds: float, scale: float, in_process: bool, data_dir: Path | None, as_json: bool
) -> None:
    """Measure what tenants cost a request and a token: two fabrics with simulated engines, one without tenants, and one
    with keys that have no limit, five limits, and fifteen limits in three accounts. Each is measured in every round, in
    turns, and compared with its neighbours of the same round."""

    def report_progress(message: str) -> None:
        click.echo(message, err=True)

    if in_process:
        found = asyncio.run(measure_router_path(num_rounds, max_seconds))
        click.echo(json.dumps(found) if as_json else router_path_table(found))
        return
    home = (data_dir or DEFAULT_DATA_DIR).expanduser().absolute()
    found = resolve_model(BUILTIN_MODEL_NAME, home / "models", report_progress)
    workloads = {field: workload.scaled(scale) for field, workload in _FIELDS.items()}
    plan = BenchPlan(
        model=ModelConfig(name=found.name, path=str(found.path)),
        workloads=list(workloads.values()),
        num_runs=num_rounds,
        layout=Layout(num_shards=1),
    )
    report = asyncio.run(_run(plan, workloads, max_seconds, report_progress))
    click.echo(json.dumps(report) if as_json else table(report))


async def _run(
    plan: BenchPlan, workloads: Mapping[str, Workload], max_seconds: float, on_progress: Callable[[str], None]
) -> dict[str, Any]:
    """Raises CommandError."""
    ends_at = time.monotonic() + max_seconds
    home = Path(tempfile.mkdtemp(prefix="kvloom-bench-"))
    runs: _Runs = {field: {name: [] for name in ABOUT} for field in workloads}
    try:
        on_progress("starting two fabrics, and making keys")
        async with variants(plan, SHORT, home) as compared:
            for variant in compared.values():
                for warm_up in warm_ups(SHORT):
                    await variant.measure(warm_up, 0)
            num_rounds = 0
            while num_rounds < plan.num_runs and (not num_rounds or time.monotonic() < ends_at):
                num_rounds += 1
                on_progress(f"round {num_rounds} of {plan.num_runs}")
                await _measure_round(compared, workloads, num_rounds, runs)
        shutil.rmtree(home, ignore_errors=True)  # after a failure its logs are of use
    except CommandError as error:
        raise CommandError(f"{error} (the fabrics' logs are in {home})") from error
    return report_of(runs, workloads)


async def _measure_round(
    compared: Mapping[str, Variant], workloads: Mapping[str, Workload], number: int, runs: _Runs
) -> None:
    names = list(compared) if number % 2 else list(compared)[::-1]
    for field, workload in workloads.items():
        for name in names:
            figures = figures_of(workload, await compared[name].measure(workload, number))
            if figures["num_errors"]:
                raise CommandError(f"{name}: {figures['num_errors']} requests failed: {figures['errors']}")
            runs[field][name].append(figures)


def report_of(runs: _Runs, workloads: Mapping[str, Workload]) -> dict[str, Any]:
    """For each variant the median of every figure by role, and `over_off`: what it has over the same round's figure
    without tenants. `sum` is edge, router and safety."""
    report: dict[str, Any] = {
        "num_rounds": len(next(iter(runs.values()))[OFF]),
        "workloads": {field: workload.about for field, workload in workloads.items()},
        "variants": {name: {"about": about} for name, about in ABOUT.items()},
    }
    for field, by_variant in runs.items():
        reference = _columns(by_variant[OFF], field)
        for name, of_rounds in by_variant.items():
            columns = _columns(of_rounds, field)
            found = report["variants"][name]
            found[field] = {role: msgspec.to_builtins(estimate(values)) for role, values in columns.items()}
            if name != OFF:
                found.setdefault("over_off", {})[field] = {
                    role: msgspec.to_builtins(differences(reference[role], values))
                    for role, values in columns.items()
                    if role in reference
                }
    return report


def _columns(of_rounds: Sequence[Mapping[str, Any]], field: str) -> dict[str, list[float]]:
    """The values of a figure in all rounds, by role."""
    return {role: [figures[field][role] for figures in of_rounds] for role in of_rounds[0][field]}


def table(report: Mapping[str, Any]) -> str:
    """The report for people."""
    found = report["variants"]
    lines = [f"{name}: {one['about']}" for name, one in found.items()]
    for field, title in _TITLES.items():
        roles = [role for role in _SHOWN_ROLES if any(role in one[field] for one in found.values())]
        confidence = next(iter(found[OFF][field].values()))["confidence"]
        lines.append("")
        lines.append(f"{title}; {report['workloads'][field]}; medians of {report['num_rounds']} rounds")
        lines.append(
            f"  {'':<10}{'sum':>8}{'over off':>10}  {f'{confidence:.0%} between':<18}"
            + "".join(f"{role:>9}" for role in roles)
        )
        for name, one in found.items():
            medians = {role: one[field][role]["median"] if role in one[field] else None for role in roles}
            shown = "".join(f"{'-' if value is None else f'{value:.1f}':>9}" for value in medians.values())
            over, between = "", ""
            if name != OFF:
                of_sum = one["over_off"][field]["sum"]
                over, between = f"{of_sum['median']:+.1f}", f"{of_sum['low']:+.1f} and {of_sum['high']:+.1f}"
            lines.append(f"  {name:<10}{one[field]['sum']['median']:>8.1f}{over:>10}  {between:<18}{shown}")
    return "\n".join(lines)
