"""`kvloom-lab bench brownout`: what the brownout ladder makes of a time of overload."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.table import Table

from lab.bench import brownout_run
from lab.bench.arrivals import Requests
from lab.bench.bench_fabric import (
    MODELLED,
    SHARD_SETTINGS,
    bench_config,
    check_engine_options,
    engine_option,
    request_options,
    shard_options,
    show_progress,
)
from lab.bench.brownout_model import BrownoutPlan, run
from lab.bench.brownout_run import LADDER, WITHOUT, FabricBrownoutPlan
from lab.bench.plots import Timeline, draw_goodput
from tools.options import option
from tools.simulate.fleet.profile import PROFILES
from tools.simulate.plot import check_plot_file

_MODELLED_SECONDS: Final = 240.0
_FABRIC_SECONDS: Final = 45.0
_MODELLED_TITLES: Final = {
    LADDER: "The default ladder (router.brownout.enabled = true)",
    "refusals_only": "Its last step alone, which refuses and degrades nothing",
    WITHOUT: "No brownout",
}
_FABRIC_TITLES: Final = {
    LADDER: "Answers of half the length, of a quarter, no batch requests and a short queue",
    WITHOUT: "No brownout",
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
@engine_option("bench-brownout")
@option("--shards", "num_shards", type=click.IntRange(1), default=1, show_default=True, scope="bench-brownout")
@option(
    "--profile",
    type=click.Choice(sorted(PROFILES)),
    default="70b",
    show_default=True,
    scope="bench-brownout",
    help="The modelled shard: a model and its hardware.",
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
@option(
    "--overload-seconds",
    type=click.FloatRange(min=4),
    scope="bench-brownout",
    help="How long the overload is; before it a quarter of that, and after it as long, are normal.  "
    f"[default: {_MODELLED_SECONDS:g} of virtual time, {_FABRIC_SECONDS:g} of a real engine]",
)
@request_options("bench-brownout", max_tokens=48)
@shard_options("bench-brownout")
@option("--seed", type=click.IntRange(0), default=1, show_default=True, scope="bench-brownout")
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Draw the share of good requests over time, and the step, into this .svg or .png file.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def bench_brownout(
    engine: str, overload_seconds: float | None, plot: Path | None, as_json: bool, **settings: Any
) -> None:
    """Measure goodput before, during and after a time of overload, with the brownout ladder and without: with the real
    router core and modelled shards in virtual time, or on fabrics of torch or simulated shards that are started for
    it."""
    check_engine_options(engine, modelled=("profile",))
    if plot is not None:
        check_plot_file(plot)
    timelines: dict[str, Timeline] = {}
    if engine == MODELLED:
        fields = {field.name for field in dataclasses.fields(BrownoutPlan)} & settings.keys()
        plan = BrownoutPlan(
            overload_seconds=overload_seconds or _MODELLED_SECONDS, **{name: settings[name] for name in fields}
        )
        report, shards, titles = run(plan, timelines), plan.profile, _MODELLED_TITLES
    else:
        report = _run_fabric(engine, overload_seconds or _FABRIC_SECONDS, settings, timelines)
        shards, titles = engine, _FABRIC_TITLES
    title = f"{report['num_shards']} x {shards}"
    if plot is not None:
        begin = report["overload_seconds"] / 4
        overload = begin, begin + report["overload_seconds"]
        draw_goodput(plot, timelines, overload, f"TTFT within {report['ttft_slo_seconds']:g} s, {title}")
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _show(report, title, titles)


def _run_fabric(
    engine: str, overload_seconds: float, settings: Mapping[str, Any], timelines: dict[str, Timeline]
) -> dict[str, Any]:
    """Raises CommandError."""
    config = bench_config(engine, **{name: settings[name] for name in SHARD_SETTINGS})
    plan = FabricBrownoutPlan(
        requests=Requests(settings["num_prompt_words"], settings["max_tokens"], settings["seed"]),
        load=settings["load"],
        batch_share=settings["batch_share"],
        ttft_slo_seconds=settings["ttft_slo_seconds"],
        overload_seconds=overload_seconds,
    )
    return asyncio.run(brownout_run.run(config, plan, timelines, show_progress))


def _show(report: Mapping[str, Any], title: str, titles: Mapping[str, str]) -> None:
    console = Console()
    console.print(
        f"{title}: the fleet completes {report['capacity_per_second']:g} requests/s; objective of interactive "
        f"requests: TTFT within {report['ttft_slo_seconds']:g} s; {report['batch_share']:.0%} are batch",
        soft_wrap=True,
    )
    for name, heading in titles.items():
        found = report[name]
        console.print(_table(heading, found["phases"]))
        if found["steps"]:
            changes = ", ".join(f"{step} at {at:g} s" for at, step in found["steps"])
            console.print(f"steps: {changes}", soft_wrap=True)
            counts = ", ".join(f"{effect} {count}" for effect, count in sorted(found["effects"].items()))
            console.print(f"effects on requests: {counts}\n", soft_wrap=True)
        if num_errors := sum(row.get("errors", 0) for row in found["phases"]):
            console.print(f"other errors: {num_errors}")


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
