"""`kvloom-lab bench spot-notice`: what streams notice when a shard's machine is taken away at short notice."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.table import Table

from lab.bench.bench_fabric import Device, bench_config, shard_options
from lab.bench.spot_notice_run import NoticePlan, NoticeReport, run
from tools.options import Seconds, option

_ROWS = (
    ("streams", "num_streams"),
    ("errors", "num_errors"),
    ("differing bytes", "num_differing_bytes"),
    ("streams on the shard with notice", "num_on_noticed_shard"),
    ("  finished there in time", "num_finished_in_time"),
    ("  moved before its end", "num_moved"),
    ("  returned at its end", "num_returned"),
    ("tokens computed again", "num_tokens_computed_again"),
)


@click.command()
@option("--shards", "num_shards", type=click.IntRange(2, 16), default=2, show_default=True, scope="bench-spot-notice")
@option(
    "--streams",
    "num_streams",
    type=click.IntRange(1, 1024),
    default=8,
    show_default=True,
    scope="bench-spot-notice",
    help="Answers that run at the same time; every fourth asks for a fifth of the tokens.",
)
@option(
    "--prompt-words",
    "num_prompt_words",
    type=click.IntRange(1, 1000),
    default=40,
    show_default=True,
    scope="bench-spot-notice",
)
@option(
    "--max-tokens",
    type=click.IntRange(2, 4000),
    default=160,
    show_default=True,
    scope="bench-spot-notice",
    help="Output tokens of each answer.",
)
@option(
    "--within",
    "within_seconds",
    type=Seconds(600.0),
    default="5s",
    show_default=True,
    metavar="TIME",
    scope="bench-spot-notice",
    help="How long after the notice the shard is killed.",
)
@shard_options("bench-spot-notice")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def bench_spot_notice(
    num_shards: int,
    num_streams: int,
    num_prompt_words: int,
    max_tokens: int,
    within_seconds: float,
    model: str,
    device: Device,
    data_dir: Path | None,
    as_json: bool,
) -> None:
    """Run streams on torch shards, give the busiest shard notice, and kill it when the time is over. Compares every
    answer with that of the same request in an undisturbed run before. Exits with 1 if one failed or differs."""
    config = bench_config("torch", model, device, data_dir, num_shards=num_shards)
    report = asyncio.run(run(config, NoticePlan(num_streams, num_prompt_words, max_tokens, within_seconds)))
    if as_json:
        click.echo(msgspec.json.encode(report).decode())
    else:
        _show(report, within_seconds)
    if report.num_errors or report.num_differing_bytes:
        raise SystemExit(1)


def _show(report: NoticeReport, within_seconds: float) -> None:
    table = Table(title=f"A notice of {within_seconds:g} s under load", title_justify="left", show_header=False)
    for title, field in _ROWS:
        table.add_row(title, str(getattr(report, field)))
    table.add_row("longest pause of a stream", f"{report.longest_pause_seconds:.2f} s")
    table.add_row("  in the undisturbed run", f"{report.undisturbed_pause_seconds:.2f} s")
    how = "killed" if report.shard_was_killed else "by itself"
    table.add_row("the shard ended", f"{how}, {report.shard_ended_after_seconds:.1f} s after the notice")
    Console().print(table)
