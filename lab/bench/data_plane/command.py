"""`kvloom-lab bench data-plane`: CPU time of the fabric itself per token and per request, process by process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from kvloom_common.config import ModelConfig
from lab.bench.data_plane.peer_comparison import PEERS, run_with_peers
from lab.bench.data_plane.peer_table import peers_table, write_into_page
from lab.bench.data_plane.run import OURS, BenchPlan, Layout, run_bench
from lab.bench.data_plane.scale import GRID, parse_layout, run_scale_out
from lab.bench.data_plane.scale_table import BEGIN as SCALE_BEGIN
from lab.bench.data_plane.scale_table import END as SCALE_END
from lab.bench.data_plane.scale_table import scale_table
from lab.bench.data_plane.turns import COMPARISONS, run_by_turns
from lab.bench.data_plane.workloads import WORKLOADS
from lab.bench.page_table import write_between
from shard_server.engines.torch_engine.checkpoint.converted_model import BUILTIN_MODEL_NAME
from tools.models.resolve import resolve_model
from tools.options import DEFAULT_DATA_DIR, data_dir_option


@click.command("data-plane")
@click.option(
    "--workload",
    "names",
    default="W1",
    show_default=True,
    metavar="NAME,NAME|all",
    help=f"Of {', '.join(WORKLOADS)}.",
)
@click.option("--runs", "num_runs", type=click.IntRange(1, 100), default=3, show_default=True, help="Runs of each.")
@click.option("--edges", "num_edges", type=click.IntRange(1, 64), default=1, show_default=True, help="Processes.")
@click.option("--routers", "num_routers", type=click.IntRange(1, 64), default=1, show_default=True, help="Processes.")
@click.option("--shards", "num_shards", type=click.IntRange(1, 1024), default=2, show_default=True, help="Simulated.")
@click.option("--colocate", is_flag=True, help="A router inside each edge's process.")
@click.option("--no-safety", is_flag=True, help="Check no prompt and screen no answer.")
@click.option(
    "--scale",
    type=click.FloatRange(min=0, max=1, min_open=True),
    default=1.0,
    show_default=True,
    help="Share of a workload's streams and requests.",
)
@click.option("--no-warm-up", is_flag=True, help="Measure from the first request on.")
@click.option(
    "--compare",
    "comparison",
    type=click.Choice(COMPARISONS),
    default=None,
    help="Each workload in two variants, measured alternately: answers gated or not screened; alone or beside long "
    "prompts; event loops that stay on a CPU or not; text or the same text as a tool call's argument.",
)
@click.option("--scale-out", is_flag=True, help="Fabrics of growing size: edges x routers x shards, up to 256 shards.")
@click.option(
    "--layout",
    "layouts",
    multiple=True,
    metavar="ExRxS",
    help="A size for --scale-out: so many edges, routers and shards. Repeatable.",
)
@click.option("--peers", is_flag=True, help="Other gateways beside ours, in turns; they are fetched first.")
@click.option("--peer", "peer_names", multiple=True, type=click.Choice(list(PEERS)), help="Only this one. Repeatable.")
@click.option(
    "--page",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    default=None,
    help="Write the table of --peers or --scale-out into this page, between its markers.",
)
@click.option("--model", default=BUILTIN_MODEL_NAME, show_default=True, help="A model's tokenizer and template.")
@data_dir_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
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
    scale_out: bool,
    layouts: tuple[str, ...],
    peers: bool,
    peer_names: tuple[str, ...],
    page: Path | None,
    model: str,
    data_dir: Path | None,
    as_json: bool,
) -> None:
    """Measure the fabric around simulated engines: CPU per token and request, added latency, memory."""
    chosen = list(WORKLOADS) if names == "all" else [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in WORKLOADS:
            raise click.BadParameter(f"{name!r} is none of {', '.join(WORKLOADS)}", param_hint="--workload")

    for layout in layouts:
        try:
            parse_layout(layout)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--layout") from error

    def report_progress(message: str) -> None:
        click.echo(message, err=True)

    home = (data_dir or DEFAULT_DATA_DIR).expanduser().absolute()
    found = resolve_model(model, home / "models", report_progress)
    plan = BenchPlan(
        model=ModelConfig(name=found.name, path=str(found.path)),
        workloads=[WORKLOADS[name].scaled(scale) for name in dict.fromkeys(chosen)],
        num_runs=num_runs,
        layout=Layout(num_edges=num_edges, num_routers=num_routers, num_shards=num_shards, colocate=colocate),
        with_safety=not no_safety,
        is_warmed_up=not no_warm_up,
    )
    if sum((comparison is not None, scale_out, peers or bool(peer_names))) > 1:
        raise click.UsageError("--compare, --scale-out and --peers exclude one another.")
    if scale_out:
        reports = run_scale_out(plan, layouts or GRID, report_progress)
        options = "".join(f" --layout {layout}" for layout in layouts) + (f" --scale {scale:g}" if scale < 1 else "")
        table = scale_table(
            reports, f"kvloom-lab bench data-plane --scale-out{options} --workload {names} --runs {num_runs}"
        )
        if page is not None:
            write_between(page, SCALE_BEGIN, SCALE_END, table)
        click.echo(json.dumps(reports) if as_json else table)
        return
    if comparison is not None:
        found_by_turns = run_by_turns(comparison, plan, report_progress)
        click.echo(json.dumps(found_by_turns)) if as_json else _print_turns(found_by_turns)
        return
    if peers or peer_names:
        wanted = [PEERS[name] for name in peer_names or PEERS]
        reports, missing = run_with_peers(plan, wanted, home / "peers", report_progress)
        options = "".join(f" --peer {name}" for name in peer_names) + (f" --scale {scale:g}" if scale < 1 else "")
        table = peers_table(
            reports, missing, f"kvloom-lab bench data-plane --peers{options} --workload {names} --runs {num_runs}"
        )
        if page is not None:
            write_into_page(page, table)
        print(json.dumps({"reports": reports, "missing": missing}) if as_json else table)
        return
    reports = run_bench(plan, report_progress)
    click.echo(json.dumps(reports)) if as_json else _print(reports)


def _print(reports: Sequence[dict[str, Any]]) -> None:
    for report in reports:
        runs = f"median of {report['num_runs']} runs (± half the spread)"
        print(f"{report['workload']}: {report['about']}; {_layout(report)}; {runs}")
        for label, field in (("CPU-us a token", "cpu_us_per_token"), ("CPU-us a request", "cpu_us_per_request")):
            values, spread = report[field], report["spread"][field]
            roles = ", ".join(f"{role} {values[role]:.2f}" for role in OURS if role in values)
            print(f"  {label:<22}{values['sum']:.2f} ±{spread['sum'] / 2:.2f}  ({roles}; shards {values['shard']:.2f})")
        for label, field in (("added TTFT ms", "added_ttft_ms"), ("transit ms a token", "transit_ms")):
            values, spread = report[field], report["spread"][field]
            if values["p50"] is not None:
                shown = " / ".join(f"{values[p]:.2f} ±{spread[p] / 2:.2f}" for p in ("p50", "p99"))
                print(f"  {label:<22}{shown}  (p50 / p99)")
        print(
            f"  {'per second':<22}{report['tokens_per_second']:,.0f} tokens, {report['requests_per_second']:,.0f} "
            f"requests; {report['events_per_read']:.2f} events a read"
        )
        print(f"  {'memory':<22}{report['rss_kb_per_stream']:.1f} kB a stream")
        print(f"  {'errors':<22}{report['num_errors']}")
        for run in report["runs"]:
            for error, count in run["errors"].items():
                print(f"    {count} x {error}")


def _print_turns(comparisons: Sequence[dict[str, Any]]) -> None:
    for compared in comparisons:
        print(f"{compared['workload']}, {compared['comparison']}:")
        rows = [(name, report["cpu_us_per_token"]["sum"], report) for name, report in compared["variants"].items()]
        rows.append(("difference", compared["difference"]["cpu_us_per_token"], compared["difference"]))
        for name, cpu_us, figures in rows:
            ttft, transit = (
                " / ".join("-" if figures[field][p] is None else f"{figures[field][p]:.2f}" for p in ("p50", "p99"))
                for field in ("added_ttft_ms", "transit_ms")
            )
            print(
                f"  {name:<22}{cpu_us:8.2f} CPU-us a token   added TTFT ms {ttft}   transit ms {transit}  (p50 / p99)"
            )


def _layout(report: dict[str, Any]) -> str:
    layout = Layout(**report["layout"])
    counts = {"shard": layout.num_shards, "edge": layout.num_edges, "router": layout.num_routers}
    if layout.colocate:
        del counts["router"]
    parts = [f"{count} {role}{'s' if count > 1 else ''}" for role, count in counts.items()]
    if layout.colocate:
        parts.append("routers inside the edges")
    return f"{', '.join(parts)}, safety {'on' if report['safety'] else 'off'}"
