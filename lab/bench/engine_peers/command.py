"""`kvloom-lab bench engine-peers`: our engine beside others on the same model and prompts."""

from __future__ import annotations

import os
from pathlib import Path

import click

from lab.bench.engine_peers.versus import CHOICES, compare, comparison_table, plan_entrants
from shard_server.engines.torch_engine.checkpoint.converted_model import BUILTIN_MODEL_NAME
from tools.bench.engine.command import measure_and_print, resolve, show_progress
from tools.failures import CommandError
from tools.options import data_dir_option, option


@click.command("engine-peers")
@click.argument("names", metavar="NAME,...")
@option("--model", default=BUILTIN_MODEL_NAME, show_default=True, help="Name, directory or .gguf file.")
@option("--threads", "num_threads", type=click.IntRange(0), default=0, help="0: one per core.")
@click.option("--rounds", "num_rounds", type=click.IntRange(1, 50), default=3, show_default=True)
@option("--minutes", type=click.FloatRange(1), default=9.0, show_default=True, help="The time for everything.")
@data_dir_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def bench_engine_peers(
    names: str,
    model: str,
    num_threads: int,
    num_rounds: int,
    minutes: float,
    data_dir: Path | None,
    as_json: bool,
) -> None:
    """Measure our engine and others in turn: bf16, float32, int8, packed of ours, vllm, llamacpp, by commas."""
    chosen = [name.strip() for name in names.split(",")]
    if unknown := set(chosen) - set(CHOICES):
        raise CommandError(f"there are {', '.join(CHOICES)}, not {', '.join(sorted(unknown))}")
    folder, model_dir = resolve(model, data_dir)
    entrants = plan_entrants(chosen, model, model_dir, num_threads or os.cpu_count() or 1, folder / "engines")
    measure_and_print(
        as_json, comparison_table, lambda: compare(entrants, num_rounds, show_progress, max_seconds=60 * minutes)
    )
