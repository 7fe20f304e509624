"""`kvloom-lab bench overload`: the goodput that remains when clients ask for more than the fleet can serve."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from lab.bench.overload_model import OverloadPlan, run
from router.core.placement import POLICIES
from tools.options import option
from tools.simulate.fleet.profile import PROFILES

_TITLES = {"shedding": "Requests are refused early", "without": "Only a full queue refuses (sheds_early = false)"}


@click.command()
@option("--shards", "num_shards", type=click.IntRange(1), default=2, show_default=True, scope="bench-overload")
@option(
    "--profile",
    type=click.Choice(sorted(PROFILES)),
    default="70b",
    show_default=True,
    scope="bench-overload",
    help="The modelled shard: a model and its hardware.",
)
@option(
    "--policy",
    type=click.Choice(sorted(POLICIES)),
    default="ect",
    show_default=True,
    scope="bench-overload",
    help="Placement policy.",
)
@option(
    "--deadline-seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=20.0,
    show_default=True,
    scope="bench-overload",
    help="From a request's arrival to its last token; later is worth nothing.",
)
@option(
    "--seconds",
    type=click.FloatRange(min=1),
    default=120.0,
    show_default=True,
    scope="bench-overload",
    help="Virtual time during which requests arrive.",
)
@option("--seed", type=click.IntRange(0), default=1, show_default=True, scope="bench-overload")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def bench_overload(as_json: bool, **plan: Any) -> None:
    """Measure goodput at 0.5 to 3 times the fleet's capacity, with the real router core and modelled shards in virtual
    time, so that the figures are the same on every machine."""
    report = run(OverloadPlan(**plan))
    if as_json:
        print(json.dumps(report, indent=2))
        return
    console = Console()
    console.print(
        f"{report['num_shards']} x {report['profile']}, {report['policy']}: the fleet completes "
        f"{report['capacity_per_second']:g} requests/s; deadline {report['deadline_seconds']:g} s"
    )
    for name, title in _TITLES.items():
        console.print(_table(title, report[name]))
        console.print(f"goodput at the highest load: {report['goodput_kept'][name]:.0%} of its peak\n")


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in ("load", "requests/s", "good/s", "good", "refused at once", "given up late", "wasted prefill"):
        table.add_column(heading, justify="right")
    for heading in ("TTFT p50 s", "p99"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            f"{row['load']:g}x",
            f"{row['requests_per_second']:.1f}",
            f"{row['goodput_per_second']:.1f}",
            f"{row['good_share']:.0%}",
            f"{row['refused_at_once_share']:.0%}",
            f"{row['given_up_late_share']:.1%}",
            f"{row['wasted_share']:.1%}",
            _seconds(row["ttft_p50"]),
            _seconds(row["ttft_p99"]),
        )
    return table


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
