"""`kvloom bench engine`: the speed of the embedded engine on this machine, without the fabric around it."""

from __future__ import annotations

import json
import os
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from kvloom_common.config import TorchConfig
from shard_server.engines.base import EngineError
from shard_server.engines.torch_engine.checkpoint.converted_model import BUILTIN_MODEL_NAME
from tools.bench.engine.device import SHAPES, device_table, run_device_bench
from tools.bench.engine.report import report_text, run_bench
from tools.bench.engine.throughput import DEFAULT_MAX_SECONDS
from tools.failures import CommandError
from tools.models.registry import ModelRegistry
from tools.models.resolve import resolve_model
from tools.options import DEFAULT_DATA_DIR, F, data_dir_option, option

_SETTINGS: Final = {
    "device": "What computes.",
    "dtype": "The number format.",
    "weights": "The format of the linear layers.",
    "kernels": "Compiled kernels, or torch's operators.",
}
"""The keys of `shard.torch` that are flags, with their help. Choices and defaults are those of the key."""


def _setting_options(function: F) -> F:
    hints = typing.get_type_hints(TorchConfig)
    for key, text in reversed(_SETTINGS.items()):
        choice = click.Choice(typing.get_args(hints[key]))
        default = getattr(TorchConfig(), key)
        function = option(f"--{key}", type=choice, default=default, show_default=True, help=text)(function)
    return function


@click.command("engine")
@option("--model", default=BUILTIN_MODEL_NAME, show_default=True, help="Name, directory or .gguf file.")
@option("--threads", "num_threads", type=click.IntRange(0), default=0, help="0: one per core.")
@option("--shape", type=click.Choice(list(SHAPES)), default=None, help="Random weights, beside the device's limits.")
@_setting_options
@option("--no-deterministic", is_flag=True, help="Let the last bits depend on the batch: faster prefill.")
@click.option("--temperature", type=click.FloatRange(0, 2), default=0.0, show_default=True, help="0: greedy.")
@option(
    "--seconds",
    "max_seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=DEFAULT_MAX_SECONDS,
    show_default=True,
    help="The longest time per figure.",
)
@option("--roofline", "with_roofline", is_flag=True, help="Also the share of this machine's limits. Part of --json.")
@data_dir_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def bench_engine(
    model: str,
    num_threads: int,
    shape: str | None,
    no_deterministic: bool,
    temperature: float,
    max_seconds: float,
    with_roofline: bool,
    data_dir: Path | None,
    as_json: bool,
    **settings: str,
) -> None:
    """Measure the embedded engine: prefill, decoding at batch 1, 8 and 32, memory, load time."""
    num_threads = num_threads or os.cpu_count() or 1
    if shape is not None:
        measure_and_print(as_json, device_table, lambda: run_device_bench(shape, settings["device"], show_progress))
        return
    _, model_dir = resolve(model, data_dir)
    own = {**settings, "num_threads": num_threads, "deterministic": not no_deterministic}
    measure_and_print(
        as_json,
        report_text,
        lambda: run_bench(
            model_dir,
            torch=msgspec.convert(own, TorchConfig),
            temperature=temperature,
            max_seconds=max_seconds,
            with_roofline=with_roofline or (as_json and settings["device"] == "cpu"),
            on_progress=show_progress,
        ),
    )


def resolve(model: str, data_dir: Path | None) -> tuple[Path, Path]:
    """The data directory and the directory of the model. Raises CommandError."""
    folder = (data_dir or DEFAULT_DATA_DIR).expanduser().absolute()
    return folder, resolve_model(model, folder / "models", show_progress, ModelRegistry(folder / "models.json")).path


def measure_and_print(
    as_json: bool, render: Callable[[dict[str, Any]], str], measure: Callable[[], dict[str, Any]]
) -> None:
    """Print the report of a measurement, as JSON or rendered. Raises CommandError if there is none."""
    try:
        report = measure()
    except (EngineError, MemoryError, RuntimeError) as error:
        raise CommandError(str(error) or type(error).__name__) from error
    except KeyboardInterrupt:
        raise CommandError("interrupted before anything was measured", 130) from None
    click.echo(json.dumps(report) if as_json else render(report))


def show_progress(message: str) -> None:
    click.echo(message, err=True)
