"""`kvloom up` starts a whole fabric on this machine, and `kvloom down` stops it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import click

from kvloom_common.config import KvloomConfig
from shard_server.engines.torch_engine.checkpoint.converted_model import BUILTIN_MODEL_NAME
from tools.failures import CommandError
from tools.models.resolve import model_cache_dir
from tools.options import EngineName, choose_data_dir, config_option, data_dir_option, load_config_file, option
from tools.supervisor.detach import run_detached
from tools.supervisor.flag_model import flag_model
from tools.supervisor.process_specs import ROLES
from tools.supervisor.reporters import foreground_reporter
from tools.supervisor.state import RunFolder

PORT = click.IntRange(0, 65535)
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
@option("--edges", type=click.IntRange(1, 256), help="The number of HTTP edges. They share the port.  [default: 1]")
@option("--routers", type=click.IntRange(1, 256), help="The number of routers. They share the port.  [default: 1]")
@option("--colocate", is_flag=True, help="Run a router inside each edge, which saves one hop per token.")
@option(
    "--engine",
    type=EngineName(),
    metavar="torch|sim|NAME",
    help="The engine that computes the tokens. NAME: that of a plugin.  [default: torch]",
)
@option("--sim-step-ms", type=click.FloatRange(min=0), help="The duration of a step of the sim engine.  [default: 20]")
@option(
    "--sim-prefill-tokens-per-second",
    type=click.FloatRange(min=0, min_open=True),
    help="The prefill speed of the sim engine.  [default: 20000]",
)
@option(
    "--no-deterministic",
    is_flag=True,
    help="Prefill faster, but let the last bits of the results of the torch engine depend on the batch.",
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
@option("--http-port", type=PORT, help="The port of the HTTP API and chat page. 0 picks one.  [default: 8080]")
@option("--router-port", type=PORT, help="The port of the gRPC API. 0 picks one.  [default: 8081]")
@option(
    "--metrics-port",
    type=click.IntRange(1, 65535),
    help="The first of the ports for /metrics: safety service, routers, edges, control, shards.  [default: free ones]",
)
@data_dir_option
@config_option
@option(
    "--secret-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file with the fabric's secret.  [default: DATA_DIR/secret, made at the first start]",
)
@option(
    "--api-keys",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file with the hashes of API keys (`kvloom keys`). Clients then need a key.",
)
@option(
    "--tls-certificate",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The certificate of the HTTP and gRPC ports, in PEM. It is reloaded when the file changes.",
)
@option("--tls-key", type=click.Path(path_type=Path, dir_okay=False), help="The key of that certificate.")
@option(
    "--tls-client-ca",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The authorities of clients' certificates, which clients then need.",
)
@option(
    "--control",
    is_flag=True,
    help="Serve tenants: the holders of the keys that `kvloom keys create` makes, and nobody else (docs/tenancy.md).",
)
@option(
    "--insecure",
    is_flag=True,
    help="Listen on other addresses than loopback even without TLS or API keys.",
)
@option("--host", help="The address on which the HTTP and gRPC ports listen.  [default: 127.0.0.1]")
@option(
    "--name-prefix",
    metavar="TEXT",
    help="The beginning of the processes' names, which are unique in a fleet.  [default: from --advertise]",
)
@option(
    "--redis-url",
    "--join",
    "redis_url",
    metavar="URL",
    help="Use this Redis-protocol server instead of the embedded one. Machines that share one are a fleet.",
)
@option(
    "--role",
    type=click.Choice(ROLES),
    multiple=True,
    help="A role that this machine of a fleet has. May be repeated.  [default: all]",
)
@option(
    "--advertise",
    metavar="HOST",
    help="The host by which the other machines of a fleet reach this one (docs/fleet.md).",
)
@option(
    "--start-timeout-seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=300.0,
    show_default=True,
    help="The longest time that a process may take to start.",
)
@option("--detach", is_flag=True, help="Return when the fabric is ready, and leave it running.")
def up(
    data_dir: Path | None,
    config_file: Path | None,
    cache_dir: Path | None,
    start_timeout_seconds: float,
    detach: bool,
    **flags: Any,
) -> None:
    """Start the fabric: Redis, control if enabled, safety service, routers, engine shards and HTTP edges.

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

    config = read(config_file)
    folder = RunFolder(choose_data_dir(data_dir, config))
    launch = Launch(
        config=config,
        folder=folder,
        models=[flag_model(value) for value in models],
        num_shards={name: count for name, count in flags["shards"].items() if name},
        model_cache_dir=(cache_dir or model_cache_dir(folder.data_dir)).expanduser().absolute(),
        start_timeout_seconds=start_timeout_seconds,
        config_file=config_file and config_file.expanduser().absolute(),
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
@data_dir_option
@config_option
@option(
    "--timeout-seconds",
    scope="down",
    type=click.FloatRange(min=0, min_open=True),
    default=120.0,
    show_default=True,
    help="The longest time to wait until all processes have stopped.",
)
def down(data_dir: Path | None, config_file: Path | None, timeout_seconds: float) -> None:
    """Stop the fabric that runs with this data directory, and return when all its processes have exited."""
    folder = RunFolder(choose_data_dir(data_dir, load_config_file(config_file)))
    state = folder.require_running()
    os.kill(state.supervisor_pid, signal.SIGTERM)
    if not folder.wait_until_gone(state, timeout_seconds):
        raise CommandError(f"kvloom (pid {state.supervisor_pid}) still runs after {timeout_seconds:g} s")
    print(f"stopped {state.place}")
