"""`kvloom bench brownout`: what the brownout ladder makes of a time of overload."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from tools.bench.brownout_model import BrownoutPlan, run
from tools.options import option
from tools.simulate.fleet.profile import PROFILES

_TITLES = {
    "ladder": "The default ladder (router.brownout.enabled = true)",
    "refusals_only": "Its last step alone, which refuses and degrades nothing",
    "without": "No brownout",
}
_HEADINGS = (
    "phase",
    "load",
    "asked/s",
    "good/s",
    "good",
    "refused",
    "TTFT p50 s",
    "p95",
    "tokens",
    "batch",
)


@click.command()
@option("--shards", "num_shards", type=click.IntRange(1), default=1, show_default=True, scope="bench-brownout")
@option(
    "--profile",
    type=click.Choice(sorted(PROFILES)),
    default="70b",
    show_default=True,
    scope="bench-brownout",
    help="What a shard is.",
)
@option(
    "--load",
    type=click.FloatRange(min=0.1, max=20),
    default=3.0,
    show_default=True,
    scope="bench-brownout",
    help="Requests during the overload, as a multiple of what the fleet can serve.",
)
@option(
    "--ttft-slo-seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=2.0,
    show_default=True,
    scope="bench-brownout",
    help="A request is good if its first token comes within this time.",
)
@option(
    "--batch-share",
    type=click.FloatRange(0, 1),
    default=0.4,
    show_default=True,
    scope="bench-brownout",
    help="Share of the requests in the batch tier.",
)
@option("--seed", type=click.IntRange(0), default=1, show_default=True, scope="bench-brownout")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def bench_brownout(as_json: bool, **plan: Any) -> None:
    """Measure goodput before, during and after a time of overload, with the brownout ladder and without, with the
    real router core and modelled shards in virtual time."""
    report = run(BrownoutPlan(**plan))
    if as_json:
        print(json.dumps(report, indent=2))
        return
    console = Console()
    console.print(
        f"{report['num_shards']} x {report['profile']}: the fleet completes {report['capacity_per_second']:g} "
        f"requests/s; objective of interactive requests: TTFT within {report['ttft_slo_seconds']:g} s; "
        f"{report['batch_share']:.0%} are batch",
        soft_wrap=True,
    )
    for name, title in _TITLES.items():
        console.print(_table(title, report[name]["phases"]))
        if report[name]["steps"]:
            changes = ", ".join(f"{step} at {at:g} s" for at, step in report[name]["steps"])
            console.print(f"steps: {changes}", soft_wrap=True)
            counts = ", ".join(f"{effect} {count}" for effect, count in sorted(report[name]["effects"].items()))
            console.print(f"effects on requests: {counts}\n", soft_wrap=True)


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in _HEADINGS:
        table.add_column(heading, justify="left" if heading == "phase" else "right")
    for row in rows:
        table.add_row(
            row["phase"],
            f"{row['load']:g}x",
            f"{row['interactive_per_second']:.1f}",
            f"{row['goodput_per_second']:.1f}",
            _percent(row["good_share"]),
            _percent(row["refused_share"]),
            _number(row["ttft_p50"]),
            _number(row["ttft_p95"]),
            "-" if row["mean_output_tokens"] is None else str(row["mean_output_tokens"]),
            _percent(row["batch_answered_share"]),
        )
    return table


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
