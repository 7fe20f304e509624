"""`kvloom-lab bench fairness`: what a tenant that floods the fleet costs another one."""

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

from lab.bench import fairness_run
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
from lab.bench.fairness_model import FairnessPlan, run
from lab.bench.fairness_run import FabricFairnessPlan
from router.core.placement import POLICIES
from tools.failures import CommandError
from tools.options import option
from tools.simulate.fleet.profile import PROFILES
from tools.simulate.plot import check_plot_file, draw
from tools.simulate.runs import Curves

_MODELLED_SECONDS: Final = 120.0
_MIN_MODELLED_SECONDS: Final = 20.0
_FABRIC_SECONDS: Final = 40.0
_COLUMNS: Final = (
    ("requests", "requests", "d"),
    ("answered", "answered", "d"),
    ("errors", "errors", "d"),
    ("tokens/s", "tokens_per_second", ".0f"),
    ("TTFT p50 s", "ttft_p50", ".2f"),
    ("p99", "ttft_p99", ".2f"),
)
"""(heading, field, format); modelled shards report no errors."""


@click.command()
@engine_option("bench-fairness")
@option("--shards", "num_shards", type=click.IntRange(1), default=2, show_default=True, scope="bench-fairness")
@option(
    "--profile",
    type=click.Choice(sorted(PROFILES)),
    default="70b",
    show_default=True,
    scope="bench-fairness",
    help="The modelled shard: a model and its hardware.",
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
    help="The calm tenant asks for this share of what the fleet can serve.",
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
    type=click.FloatRange(min=4),
    scope="bench-fairness",
    help="How long requests arrive, in each run.  [default: 120 of virtual time, 40 of a real engine]",
)
@option(
    "--competing-prefill-seconds",
    type=click.FloatRange(min=0),
    scope="bench-fairness",
    help="In place of the router's default; 0: no limit.",
)
@request_options("bench-fairness", max_tokens=16)
@shard_options("bench-fairness")
@option("--seed", type=click.IntRange(0), default=1, show_default=True, scope="bench-fairness")
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Draw the distribution of the calm tenant's TTFT into this .svg or .png file.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def bench_fairness(engine: str, plot: Path | None, as_json: bool, seconds: float | None, **settings: Any) -> None:
    """Measure how much later a calm tenant's answers begin beside one that floods the fleet than alone: with the real
    router core and modelled shards in virtual time, so that the figures are the same on every machine, or on a fabric
    of torch or simulated shards that is started for it."""
    check_engine_options(engine, modelled=("profile",))
    if plot is not None:
        check_plot_file(plot)
    curves: dict[str, Curves] = {}
    if engine == MODELLED:
        report, shards = _run_modelled(_MODELLED_SECONDS if seconds is None else seconds, settings, curves)
    else:
        report, shards = _run_fabric(engine, _FABRIC_SECONDS if seconds is None else seconds, settings, curves)
    title = f"{report['num_shards']} x {shards}, {report['policy']}"
    if plot is not None:
        draw(plot, curves, f"TTFT of the calm tenant, {title}")
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _show(report, title)


def _run_modelled(seconds: float, settings: Mapping[str, Any], curves: dict[str, Curves]) -> tuple[dict[str, Any], str]:
    """The report, and what a shard is. Raises CommandError."""
    if seconds < _MIN_MODELLED_SECONDS:
        raise CommandError(f"--seconds: at least {_MIN_MODELLED_SECONDS:g} with modelled shards")
    fields = {field.name for field in dataclasses.fields(FairnessPlan)} & settings.keys()
    plan = FairnessPlan(seconds=seconds, **{name: settings[name] for name in fields})
    return run(plan, curves), plan.profile


def _run_fabric(
    engine: str, seconds: float, settings: Mapping[str, Any], curves: dict[str, Curves]
) -> tuple[dict[str, Any], str]:
    """Returns the report, and what a shard is. Raises CommandError."""
    config = bench_config(engine, **{name: settings[name] for name in SHARD_SETTINGS})
    config.router.placement.policy = settings["policy"]
    if settings["competing_prefill_seconds"] is not None:
        config.router.fairness.competing_prefill_seconds = settings["competing_prefill_seconds"]
    plan = FabricFairnessPlan(
        requests=Requests(settings["num_prompt_words"], settings["max_tokens"], settings["seed"]),
        calm_load=settings["calm_load"],
        flood_factor=settings["flood_factor"],
        seconds=seconds,
    )
    return asyncio.run(fairness_run.run(config, plan, curves, show_progress)), engine


def _show(report: Mapping[str, Any], title: str) -> None:
    console = Console()
    console.print(
        f"{title}: the fleet completes {report['capacity_per_second']:g} requests/s; the calm tenant asks for "
        f"{report['calm_load']:.0%} of that, the other for {report['flood_factor']:g} times as much",
        soft_wrap=True,
    )
    columns = _COLUMNS if "errors" in report["rows"][0] else [one for one in _COLUMNS if one[1] != "errors"]
    table = Table()
    table.add_column("the calm tenant")
    for heading, _, _ in columns:
        table.add_column(heading, justify="right")
    for row in report["rows"]:
        cells = ("-" if row[field] is None else format(row[field], digits) for _, field, digits in columns)
        table.add_row(row["run"], *cells)
    console.print(table)
    served = f"beside the flood, the fleet served {report['served_tokens_per_second']:.0f} tokens/s of both"
    if "served_as_one_tokens_per_second" in report:
        served += f", and {report['served_as_one_tokens_per_second']:.0f} as one tenant"
    console.print(served)
    if report["ttft_p99_rise"] is not None:
        console.print(f"TTFT p99 beside the flood: {report['ttft_p99_rise']:+.0%} against alone")
