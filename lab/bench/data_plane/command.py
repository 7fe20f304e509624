"""`kvloom-lab bench data-plane`: CPU time of the fabric itself per token and per request, process by process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import click

from kvloom_common.config import ModelConfig
from lab.bench.data_plane.peer_comparison import PEERS, run_with_peers
from lab.bench.data_plane.peer_table import peers_table
from lab.bench.data_plane.run import OURS, BenchPlan, Layout, run_bench
from lab.bench.data_plane.turns import COMPARISONS, run_by_turns
from lab.bench.data_plane.workloads import WORKLOADS
from lab.bench.experiment import Column, Report, TableOf, experiment, show_progress
from lab.flags import DATA_DIR, count, flag, number, switch
from shard_server.engines.torch_engine.checkpoint.converted_model import BUILTIN_MODEL_NAME
from tools.models.resolve import resolve_model
from tools.options import DEFAULT_DATA_DIR


def _p50_p99(field: str) -> Callable[[Any], str]:
    return lambda row: " / ".join("-" if row[field][p] is None else f"{row[field][p]:.2f}" for p in ("p50", "p99"))


_TURNS: Final = (
    Column("", "variant", is_left=True),
    Column("CPU-µs a token", "cpu_us", ".2f"),
    Column("added TTFT ms, p50 / p99", _p50_p99("added_ttft_ms")),
    Column("transit ms, p50 / p99", _p50_p99("transit_ms")),
)


@experiment(
    "data-plane",
    flag("--workload", str, "W1", f"Of {', '.join(WORKLOADS)}.", to="names", metavar="NAME,NAME|all"),
    count("--runs", 3, "Runs of each.", most=100, to="num_runs"),
    count("--edges", 1, "Processes.", most=64, to="num_edges"),
    count("--routers", 1, "Processes.", most=64, to="num_routers"),
    count("--shards", 2, "Simulated; more than 4 by one process.", most=1024, to="num_shards"),
    switch("--colocate", "A router inside each edge's process."),
    switch("--no-safety", "Check no prompt and screen no answer."),
    number("--scale", 1.0, "Share of a workload's streams and requests.", most=1, above=True),
    switch("--no-warm-up", "Measure from the first request on."),
    flag(
        "--compare",
        click.Choice(COMPARISONS),
        None,
        "Each workload in two variants, measured alternately: answers gated or not screened; alone or beside long "
        "prompts; event loops that stay on a CPU or not; text or the same text as a tool call's argument; without and "
        "with an orchestrator; answers that it stores or not.",
        to="comparison",
    ),
    switch("--peers", "Other gateways beside ours, in turns; they are fetched first."),
    flag("--peer", click.Choice(list(PEERS)), None, "Only this one. Repeatable.", to="peer_names", multiple=True),
    flag("--model", str, BUILTIN_MODEL_NAME, "A model's tokenizer and template."),
    DATA_DIR,
    page="the table of --peers",
)
def bench_data_plane(
    names: str,
    num_runs: int,
    num_edges: int,
    num_routers: int,
    num_shards: int,
    colocate: bool,
    no_safety: bool,
    scale: float,
    no_warm_up: bool,
    comparison: str | None,
    peers: bool,
    peer_names: tuple[str, ...],
    model: str,
    data_dir: Path | None,
) -> Report:
    """Measure the fabric around simulated engines: CPU per token and request, added latency, memory."""
    chosen = list(WORKLOADS) if names == "all" else [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in WORKLOADS:
            raise click.BadParameter(f"{name!r} is none of {', '.join(WORKLOADS)}", param_hint="--workload")

    home = (data_dir or DEFAULT_DATA_DIR).expanduser().absolute()
    found = resolve_model(model, home / "models", show_progress)
    plan = BenchPlan(
        model=ModelConfig(name=found.name, path=str(found.path)),
        workloads=[WORKLOADS[name].scaled(scale) for name in dict.fromkeys(chosen)],
        num_runs=num_runs,
        layout=Layout(num_edges=num_edges, num_routers=num_routers, num_shards=num_shards, colocate=colocate),
        with_safety=not no_safety,
        is_warmed_up=not no_warm_up,
    )
    if comparison is not None and (peers or peer_names):
        raise click.UsageError("--compare and --peers exclude one another.")
    what = f"{f' --scale {scale:g}' if scale < 1 else ''} --workload {names} --runs {num_runs}"
    if comparison is not None:
        compared = run_by_turns(comparison, plan, show_progress)
        return Report(compared, [TableOf(_TURNS, _rows(one), _title(one)) for one in compared])
    if peers or peer_names:
        wanted = [PEERS[name] for name in peer_names or PEERS]
        reports, missing = run_with_peers(plan, wanted, home / "peers", show_progress)
        options = "".join(f" --peer {name}" for name in peer_names)
        table = peers_table(reports, missing, f"kvloom-lab bench data-plane --peers{options}{what}")
        return Report({"reports": reports, "missing": missing}, [table], for_page=("peers", table))
    reports = run_bench(plan, show_progress)
    return Report(reports, [line for report in reports for line in _lines(report)])


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    runs = f"median of {report['num_runs']} runs (± half the spread)"
    yield f"{report['workload']}: {report['about']}; {_layout(report)}; {runs}"
    for label, field in (("CPU-us a token", "cpu_us_per_token"), ("CPU-us a request", "cpu_us_per_request")):
        values, spread = report[field], report["spread"][field]
        roles = ", ".join(f"{role} {values[role]:.2f}" for role in OURS if role in values)
        yield (f"  {label:<22}{values['sum']:.2f} ±{spread['sum'] / 2:.2f}  ({roles}; shards {values['shard']:.2f})")
    for label, field in (("added TTFT ms", "added_ttft_ms"), ("transit ms a token", "transit_ms")):
        values, spread = report[field], report["spread"][field]
        if values["p50"] is not None:
            shown = " / ".join(f"{values[p]:.2f} ±{spread[p] / 2:.2f}" for p in ("p50", "p99"))
            yield (f"  {label:<22}{shown}  (p50 / p99)")
    yield (
        f"  {'per second':<22}{report['tokens_per_second']:,.0f} tokens, {report['requests_per_second']:,.0f} "
        f"requests; {report['events_per_read']:.2f} events a read"
    )
    yield f"  {'memory':<22}{report['rss_kb_per_stream']:.1f} kB a stream"
    yield f"  {'errors':<22}{report['num_errors']}"
    for run in report["runs"]:
        for error, num_times in run["errors"].items():
            yield f"    {num_times} x {error}"


def _rows(compared: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The variants, and the difference."""
    difference = compared["difference"]
    return [
        *(
            {"variant": name, "cpu_us": report["cpu_us_per_token"]["sum"], **report}
            for name, report in compared["variants"].items()
        ),
        {"variant": "difference", "cpu_us": difference["cpu_us_per_token"], **difference},
    ]


def _title(compared: Mapping[str, Any]) -> str:
    return f"{compared['workload']}, {compared['comparison']}"


def _layout(report: Mapping[str, Any]) -> str:
    layout = Layout(**report["layout"])
    counts = {"shard": layout.num_shards, "edge": layout.num_edges, "router": layout.num_routers}
    if layout.colocate:
        del counts["router"]
    parts = [f"{count} {role}{'s' if count > 1 else ''}" for role, count in counts.items()]
    if layout.colocate:
        parts.append("routers inside the edges")
    return f"{', '.join(parts)}, safety {'on' if report['safety'] else 'off'}"
