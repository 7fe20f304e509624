"""`kvloom bench fairness`: what a tenant that floods the fleet costs another one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from router.core.placement import POLICIES
from tools.bench.fairness_model import FairnessPlan, run
from tools.options import option
from tools.simulate.fleet.profile import PROFILES
from tools.simulate.plot import check_plot_file, draw
from tools.simulate.runs import Curves


@click.command()
@option("--shards", "num_shards", type=click.IntRange(1), default=2, show_default=True, scope="bench-fairness")
@option(
    "--profile",
    type=click.Choice(sorted(PROFILES)),
    default="70b",
    show_default=True,
    scope="bench-fairness",
    help="What a shard is.",
)
@option(
    "--policy",
    type=click.Choice(sorted(POLICIES)),
    default="ect",
    show_default=True,
    scope="bench-fairness",
    help="Placement policy.",
)
@option(
    "--calm-load",
    type=click.FloatRange(min=0, max=1, min_open=True),
    default=0.2,
    show_default=True,
    scope="bench-fairness",
    help="What the calm tenant asks for, of what the fleet can serve.",
)
@option(
    "--flood-factor",
    type=click.FloatRange(min=0, min_open=True),
    default=10.0,
    show_default=True,
    scope="bench-fairness",
    help="How many times as much the other tenant asks for.",
)
@option(
    "--seconds",
    type=click.FloatRange(min=20),
    default=120.0,
    show_default=True,
    scope="bench-fairness",
    help="Virtual time during which requests arrive.",
)
@option(
    "--competing-prefill-seconds",
    type=click.FloatRange(min=0),
    scope="bench-fairness",
    help="In place of the router's default; 0: no limit.",
)
@option("--seed", type=click.IntRange(0), default=1, show_default=True, scope="bench-fairness")
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Draw the distribution of the calm tenant's TTFT into this .svg or .png file.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def bench_fairness(as_json: bool, plot: Path | None, **plan: Any) -> None:
    """Measure how much later a calm tenant's answers begin beside one that floods the fleet than alone, with the real
    router core and modelled shards in virtual time, so that the figures are the same on every machine."""
    curves: dict[str, Curves] = {}
    if plot is not None:
        check_plot_file(plot)
    report = run(FairnessPlan(**plan), curves)
    if plot is not None:
        draw(plot, curves, f"TTFT of the calm tenant, {report['num_shards']} x {report['profile']}, {report['policy']}")
    if as_json:
        print(json.dumps(report, indent=2))
        return
    console = Console()
    console.print(
        f"{report['num_shards']} x {report['profile']}, {report['policy']}: the fleet completes "
        f"{report['capacity_per_second']:g} requests/s; the calm tenant asks for {report['calm_load']:.0%} of that, "
        f"the other for {report['flood_factor']:g} times as much"
    )
    table = Table()
    table.add_column("the calm tenant")
    for heading in ("requests", "answered", "tokens/s", "TTFT p50 s", "p99"):
        table.add_column(heading, justify="right")
    for row in report["rows"]:
        table.add_row(
            row["run"],
            str(row["requests"]),
            str(row["answered"]),
            f"{row['tokens_per_second']:.0f}",
            f"{row['ttft_p50']:.2f}",
            f"{row['ttft_p99']:.2f}",
        )
    console.print(table)
    console.print(f"beside the flood, the fleet served {report['served_tokens_per_second']:.0f} tokens/s of both")
    console.print(f"TTFT p99 beside the flood: {report['ttft_p99_rise']:+.0%} against alone")
