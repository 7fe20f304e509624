"""`kvloom plan`: how many shards a load needs for an objective."""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any, Final

import click
import msgspec
from rich.console import Console
from rich.table import Table

from tools.options import option
from tools.plan.demand import PlannedLoad, measured_demand, parse_targets, write_trace
from tools.plan.estimate import Estimate, estimate
from tools.plan.search import GOODPUT, smallest_fleet
from tools.simulate.bound import simulate_bound
from tools.simulate.fleet.fleet import MODEL, ModelFleet
from tools.simulate.fleet.profile import Profile, load_profile
from tools.simulate.rows import measure_runs
from tools.simulate.runs import RunSpec, TraceSource
from tools.simulate.statistics import Slo
from tools.simulate.traces import FORMATS, MAX_THINK_SECONDS, TraceFormat, guess_format, read_trace

SCALED_SHARDS: Final = 8
"""Stated loads are checked by a fleet of about this size, with its part of the load."""
_SYNTHETIC_SECONDS: Final = 120.0
_MAX_SYNTHETIC: Final = 20_000
_POLICY: Final = "ect"


@click.command("plan")
@option(
    "--trace",
    "trace_file",
    scope="plan",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A file of recorded calls, as `kvloom simulate` reads it.",
)
@option("--format", "trace_format", scope="plan", type=click.Choice(FORMATS), help="The format of the trace.")
@option(
    "--targets",
    scope="plan",
    metavar="NAME=VALUE,...",
    help="The load, instead of a trace: streams, tokens_per_second or requests_per_second, and the mean tokens of a "
    "prompt and of its output; cached is the share of prompts that others have, too.",
)
@option(
    "--rate",
    scope="plan",
    type=click.FloatRange(0, 1e6, min_open=True),
    default=1.0,
    show_default=True,
    help="The multiple of the recorded rate (mooncake, azure).",
)
@option(
    "--users",
    scope="plan",
    type=click.IntRange(1, 1_000_000),
    default=80,
    show_default=True,
    help="The number of concurrent users (weka).",
)
@option(
    "--profile",
    "profile_name",
    scope="plan",
    default="70b",
    show_default=True,
    metavar="8b|8b-h100|70b|FILE",
    help="The model and machine of a shard.",
)
@option(
    "--slo-ttft",
    scope="plan",
    type=click.FloatRange(0, min_open=True),
    default=2.0,
    show_default=True,
    help="The objective for the time to first token, in seconds.",
)
@option(
    "--slo-tpot",
    scope="plan",
    type=click.FloatRange(0, min_open=True),
    default=0.1,
    show_default=True,
    help="The objective for the mean time per output token, in seconds.",
)
@option(
    "--headroom",
    scope="plan",
    type=click.FloatRange(0, 0.9),
    default=0.15,
    show_default=True,
    help="The share of each resource that the estimate leaves free.",
)
@option(
    "--price",
    scope="plan",
    type=click.FloatRange(0),
    default=0.0,
    help="The cost of one shard for an hour. The plan then has that of an hour and of a million output tokens.",
)
@option("--max-requests", scope="plan", type=click.IntRange(2), help="The number of requests of the trace to take.")
@option("--seed", scope="plan", type=int, default=0, show_default=True, help="The seed of the simulation.")
@option("--no-check", scope="plan", is_flag=True, help="Leave the simulator out: the estimate takes no time.")
@option("--json", "as_json", scope="plan", is_flag=True, help="Print one JSON object.")
def plan(
    trace_file: Path | None,
    trace_format: TraceFormat | None,
    targets: str | None,
    rate: float,
    users: int,
    profile_name: str,
    slo_ttft: float,
    slo_tpot: float,
    headroom: float,
    price: float,
    max_requests: int | None,
    seed: int,
    no_check: bool,
    as_json: bool,
) -> None:
    """Say how many shards a load needs so that 90% of its requests meet an objective: first on paper, and then by
    replaying the load through the real router core and modelled shards, whose number is searched for."""
    profile, slo = load_profile(profile_name), Slo(slo_ttft, slo_tpot)
    with tempfile.TemporaryDirectory(prefix="kvloom-plan-") as folder:
        if trace_file is not None and targets is None:
            name = trace_format or guess_format(trace_file)
            source = TraceSource(path=str(trace_file), format=name)
            load = float(users) if name == "weka" else rate
            demand = _measured(source, load, profile, seed, max_requests)
            scale = 1.0
        elif targets is not None and trace_file is None:
            demand, load = parse_targets(targets), 1.0
            scale = min(1.0, SCALED_SHARDS / estimate(demand, profile, slo, headroom).num_shards)
            source = TraceSource(path=str(Path(folder) / "targets.jsonl"), format="mooncake")
            if not no_check:
                _write_scaled(Path(source.path), demand, scale, seed)
        else:
            raise click.UsageError("give either --trace or --targets")
        found = estimate(demand, profile, slo, headroom)
        checked: tuple[int, float] | None = None
        if not no_check:
            run = RunSpec(
                trace=source,
                load=load,
                policy=_POLICY,
                profile=profile,
                num_shards=1,
                slo=slo,
                seed=seed,
                max_requests=max_requests,
            )
            checked = smallest_fleet(lambda count: _goodput(run, count), max(1, round(found.num_shards * scale)))
    report = _report(demand, found, profile, checked, scale, price)
    if as_json:
        click.echo(json.dumps(report))
    else:
        _print(report, found, profile, slo)


def _measured(source: TraceSource, load: float, profile: Profile, seed: int, max_requests: int | None) -> PlannedLoad:
    """Raises CommandError."""
    assert source.format != "decisions"
    trace = read_trace(Path(source.path), source.format, max_think_seconds=MAX_THINK_SECONDS)
    workload = trace.workload(load, seed, max_requests)
    # Many servers, so that a closed loop goes as fast as a fleet that is large enough.
    result = simulate_bound(workload, [ModelFleet(name=MODEL, num_shards=64, profile=profile)])
    outcomes = [outcome for outcome in result.outcomes if outcome.call.call_id < workload.num_measured_calls]
    return measured_demand(outcomes or result.outcomes, profile)


def _write_scaled(path: Path, demand: PlannedLoad, scale: float, seed: int) -> None:
    scaled = msgspec.structs.replace(demand, requests_per_second=demand.requests_per_second * scale)
    answer_seconds = 2 * demand.output_tokens * 0.05
    num_requests = math.ceil(scaled.requests_per_second * max(_SYNTHETIC_SECONDS, 4 * answer_seconds))
    write_trace(path, scaled, min(max(num_requests, 200), _MAX_SYNTHETIC), seed)


def _goodput(run: RunSpec, num_shards: int) -> float:
    spec = msgspec.structs.replace(run, num_shards=num_shards)
    rows, _ = measure_runs(spec, [_POLICY], [run.seed], os.cpu_count() or 1)
    return float(rows[0]["goodput"])


def _report(
    demand: PlannedLoad,
    found: Estimate,
    profile: Profile,
    checked: tuple[int, float] | None,
    scale: float,
    price: float,
) -> dict[str, Any]:
    """Return the plan as JSON has it. Times in seconds."""
    report: dict[str, Any] = {
        "demand": msgspec.to_builtins(demand),
        "profile": profile.name,
        "estimate": {
            "shards": found.num_shards,
            "by_resource": found.by_resource,
            "binding": found.binding,
            "load_of_a_shard": msgspec.to_builtins(found.load),
            "kv_bytes": found.num_shards * profile.capacity_tokens * profile.kv_bytes_per_token,
        },
    }
    num_shards = found.num_shards
    if checked is not None:
        simulated, goodput = checked
        of_estimate = found.num_shards * scale
        num_shards = max(1, math.ceil(simulated / scale))
        report["simulated"] = {
            "shards": num_shards,
            "scale": scale,
            "simulated_shards": simulated,
            "goodput": goodput,
            "error_of_estimate": of_estimate / simulated - 1,
        }
    if price:
        per_hour = num_shards * price
        tokens_per_hour = demand.requests_per_second * demand.output_tokens * 3600
        report["cost"] = {"per_hour": per_hour, "per_million_output_tokens": per_hour / tokens_per_hour * 1e6}
    return report


def _print(report: dict[str, Any], found: Estimate, profile: Profile, slo: Slo) -> None:
    demand, console = report["demand"], Console(highlight=False)
    rate = f"{demand['requests_per_second']:,.4g} requests/s (in busy spells {demand['peak_factor']:.2f} times that)"
    lengths = f"{demand['prompt_tokens']:,.0f} + {demand['output_tokens']:,.0f} tokens"
    console.print(f"{rate}, {lengths}, {demand['cached_share']:.0%} of prompts in a cache; {profile.name}")
    console.print(f"wanted: TTFT <= {slo.ttft_seconds:g} s, {slo.tpot_seconds * 1e3:g} ms a token")
    table = Table("resource", "shards", "a shard of the fleet bears")
    load = found.load
    bears = {
        "prefill": f"{load.prefill_share:.0%} of its time, TTFT p90 {load.ttft_seconds:.2f} s",
        "decoding": f"{load.tpot_seconds * 1e3:.1f} ms a token",
        "memory": f"{load.kv_share:.0%} of its KV memory by running sequences",
        "batch": f"{load.num_sequences:.0f} of {profile.max_batch} sequences",
    }
    for name, count in found.by_resource.items():
        table.add_row(name, f"{count:,}", bears[name])
    console.print(table)
    kv_bytes = report["estimate"]["kv_bytes"]
    console.print(f"on paper: {found.num_shards:,} shards ({found.binding} decides), {kv_bytes / 2**40:,.2f} TiB of KV")
    if simulated := report.get("simulated"):
        size = "" if simulated["scale"] == 1 else f", by {simulated['simulated_shards']} with their part of the load"
        console.print(
            f"simulated: {simulated['shards']:,} shards have {simulated['goodput']:.0%} of requests within the "
            f"objective ({GOODPUT:.0%} wanted{size}); the estimate is off by {simulated['error_of_estimate']:+.0%}"
        )
    if cost := report.get("cost"):
        console.print(
            f"{cost['per_hour']:,.2f} an hour, {cost['per_million_output_tokens']:,.4f} a million output tokens"
        )
