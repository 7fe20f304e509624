"""`kvloom-lab bench preemption`: what preemption does for urgent requests on shards that batch answers fill."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

import click
import msgspec
from rich.console import Console
from rich.table import Table

from lab.bench.bench_fabric import Device, bench_config, shard_options, show_progress
from lab.bench.preemption_run import PreemptionPlan, PreemptionReport, run
from tools.options import option
from tools.simulate.plot import check_plot_file, draw
from tools.simulate.runs import Curves

_TIMES: Final = (
    ("TTFT of urgent requests, p50", "ttft_p50"),
    ("p99", "ttft_p99"),
    ("the batch took", "batch_seconds"),
)
_COUNTS: Final = (
    ("batch answers preempted", "num_preempted"),
    ("preemptions", "num_preemptions"),
    ("tokens computed again", "num_tokens_computed_again"),
    ("errors", "num_errors"),
    ("differing batch answers", "num_differing_answers"),
)


@click.command()
@option(
    "--engine",
    type=click.Choice(["torch", "sim"]),
    default="torch",
    show_default=True,
    scope="bench-preemption",
    help="The engine of the shards.",
)
@option("--shards", "num_shards", type=click.IntRange(1, 16), default=2, show_default=True, scope="bench-preemption")
@option(
    "--max-batch",
    type=click.IntRange(1, 256),
    default=4,
    show_default=True,
    scope="bench-preemption",
    help="Answers that run on a shard at the same time.",
)
@option(
    "--batch-answers",
    "num_batch",
    type=click.IntRange(2, 1024),
    default=16,
    show_default=True,
    scope="bench-preemption",
    help="Batch requests, all sent at once.",
)
@option(
    "--prompt-words",
    "num_prompt_words",
    type=click.IntRange(1, 1000),
    default=40,
    show_default=True,
    scope="bench-preemption",
)
@option(
    "--max-tokens",
    type=click.IntRange(2, 4000),
    default=160,
    show_default=True,
    scope="bench-preemption",
    help="Output tokens of the longest batch answer; the shortest has half as many.",
)
@option(
    "--urgent",
    "num_urgent",
    type=click.IntRange(1, 1024),
    default=20,
    show_default=True,
    scope="bench-preemption",
    help="Urgent requests, sent while the batch has between 10% and 60% of its text.",
)
@option(
    "--urgent-tokens",
    "max_urgent_tokens",
    type=click.IntRange(1, 4000),
    default=8,
    show_default=True,
    scope="bench-preemption",
    help="Output tokens of each urgent answer.",
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Draw the distributions of the urgent TTFT into this .svg or .png file.",
)
@shard_options("bench-preemption")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def bench_preemption(
    engine: str,
    model: str,
    device: Device,
    num_shards: int,
    max_batch: int,
    plot: Path | None,
    data_dir: Path | None,
    as_json: bool,
    **sizes: Any,
) -> None:
    """Send urgent requests to shards that batch answers fill, with preemption and without it, and to the idle fabric.
    Compares every batch answer with that of the same request in an undisturbed run. Exits with 1 if one failed or
    differs."""
    if plot is not None:
        check_plot_file(plot)
    config = bench_config(engine, model, device, data_dir, num_shards=num_shards, max_batch=max_batch)
    curves: dict[str, Curves] = {}
    report = asyncio.run(run(config, PreemptionPlan(**sizes), curves, show_progress))
    if plot is not None:
        draw(plot, curves, f"TTFT of urgent requests, {num_shards} x {engine}, {max_batch} places each")
    if as_json:
        click.echo(msgspec.json.encode(report).decode())
    else:
        _show(report)
    if not report.is_clean:
        raise SystemExit(1)


def _show(report: PreemptionReport) -> None:
    plan = report.plan
    table = Table(
        title=f"{plan.num_urgent} urgent requests, {plan.num_batch} batch answers, {report.num_shards} {report.engine} "
        f"shards of {report.max_batch} places",
        title_justify="left",
    )
    table.add_column("")
    for row in report.rows:
        table.add_column(row.run, justify="right")
    for title, field in _TIMES:
        table.add_row(title, *(_seconds(getattr(row, field)) for row in report.rows))
    for title, field in _COUNTS:
        table.add_row(title, *(str(getattr(row, field)) for row in report.rows))
    Console().print(table)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
