"""`kvloom up` starts a whole fabric on this machine, and `kvloom down` stops it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import click

from kvloom_common.config import KvloomConfig
from shard_server.engines.torch_engine.checkpoint.converted_model import BUILTIN_MODEL_NAME
from tools.cli.config_flags import config_flags
from tools.failures import CommandError
from tools.models.resolve import model_cache_dir
from tools.options import FabricFlags, choose_data_dir, fabric_options, load_config_file, option
from tools.supervisor.detach import run_detached
from tools.supervisor.flag_model import flag_model
from tools.supervisor.reporters import foreground_reporter
from tools.supervisor.state import RunFolder

MAX_SHARDS = 1024


class ShardCounts(click.ParamType):
    """Numbers of shards by model; that of "" holds for all models."""

    name = "shards"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, int]:
        if not isinstance(value, str):
            return value
        counts: dict[str, int] = {}
        for part in filter(None, value.split(",")):
            name, _, number = part.rpartition("=")
            if not number.isdecimal() or not 1 <= int(number) <= MAX_SHARDS:
                self.fail(f"{part!r} is no number from 1 to {MAX_SHARDS}, and no MODEL=N", param, ctx)
            counts[name] = int(number)
        return counts


@click.command()
@option(
    "--shards",
    type=ShardCounts(),
    default="",
    metavar="N|MODEL=N,...",
    help="The number of engine shards, of each model or by model.  [default: 2, or 1 of torch on two cores]",
)
@config_flags(
    "edges", "routers", "colocate", "engine", "sim-step-ms", "sim-prefill-tokens-per-second", "no-deterministic"
)
@option(
    "--model",
    metavar="[NAME=]NAME|PATH",
    multiple=True,
    help="A built-in or registered model, a model directory, or a .gguf file; NAME= chooses the name by which clients "
    f"request it. May be repeated, for several models.  [default: {BUILTIN_MODEL_NAME}]",
)
@option(
    "--model-cache-dir",
    "cache_dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="The directory for converted models.  [default: ~/.cache/kvloom/models, or DATA_DIR/models if that is there]",
)
@config_flags("http-port", "router-port", "metrics-port", "otlp-endpoint")
@fabric_options
@config_flags(
    "secret-file", "api-keys", "tls-certificate", "tls-key", "tls-client-ca", "control", "orchestrator", "insecure"
)
@config_flags("host", "name-prefix", "redis-url", "role", "advertise", "shards-at", "shard-port")
@option(
    "--start-timeout-seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=300.0,
    show_default=True,
    help="The longest time that a process may take to start.",
)
@option("--detach", is_flag=True, help="Return when the fabric is ready, and leave it running.")
def up(
    fabric: FabricFlags,
    cache_dir: Path | None,
    start_timeout_seconds: float,
    detach: bool,
    **flags: Any,
) -> None:
    """Start the fabric: Redis, safety service, routers, engine shards, HTTP edges; control and orchestrator if enabled.

    Prints `ready: URL` when all processes are ready. Ctrl-C stops all of them. With --join, this machine becomes one of
    a fleet, and --role chooses its part.
    """
    from tools.cli.launch import Launch, apply_flags  # here, because `down` and --help need nothing of it

    models = flags.pop("model")
    # A daemon reads them again from another directory.
    flags = {name: value.expanduser().absolute() if isinstance(value, Path) else value for name, value in flags.items()}

    def read(path: Path | None) -> KvloomConfig:
        config = load_config_file(path)
        apply_flags(config, **flags)
        return config

    config = read(fabric.config_file)
    folder = RunFolder(choose_data_dir(fabric.data_dir, config))
    launch = Launch(
        config=config,
        folder=folder,
        models=[flag_model(value) for value in models],
        num_shards={name: count for name, count in flags["shards"].items() if name},
        model_cache_dir=(cache_dir or model_cache_dir(folder.data_dir)).expanduser().absolute(),
        start_timeout_seconds=start_timeout_seconds,
        config_file=fabric.config_file and fabric.config_file.expanduser().absolute(),
        read=read,
    )
    if detach:
        # Detect another fabric before its files are touched.
        with folder.locked():
            pass
        run_detached(launch.run, folder.log_dir / "kvloom.out")
    else:
        with foreground_reporter() as reporter:
            launch.run(reporter)


@click.command()
@fabric_options
@option(
    "--timeout-seconds",
    scope="down",
    type=click.FloatRange(min=0, min_open=True),
    default=120.0,
    show_default=True,
    help="The longest time to wait until all processes have stopped.",
)
def down(fabric: FabricFlags, timeout_seconds: float) -> None:
    """Stop the fabric that runs with this data directory, and return when all its processes have exited."""
    folder = RunFolder(fabric.home())
    state = folder.require_running()
    os.kill(state.supervisor_pid, signal.SIGTERM)
    if not folder.wait_until_gone(state, timeout_seconds):
        raise CommandError(f"kvloom (pid {state.supervisor_pid}) still runs after {timeout_seconds:g} s")
    print(f"stopped {state.place}")
