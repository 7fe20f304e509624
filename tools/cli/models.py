"""`kvloom models`: registers the models on this machine, and loads, unloads, puts to sleep and wakes those of a running
fabric."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from kvloom.adapters import full_name
from kvloom.client.client import Client
from kvloom.errors import KvloomError
from kvloom.v1.router_service_pb2 import ModelInfo
from kvloom_common.config import KvloomConfig
from tools.cli.compare import compare_models
from tools.cli.rollouts import history, roll_back, roll_out
from tools.cli.router_client import RouterFlags
from tools.cli.running import running_folder
from tools.failures import CommandError
from tools.models.registry import ModelRegistry
from tools.options import FabricFlags, choose_data_dir, data_dir_option, fabric_options, option
from tools.supervisor.flag_model import flag_model
from tools.supervisor.models.adapters import UNLOAD_TIMEOUT_SECONDS, ListedAdapter
from tools.supervisor.service.client import local_supervisor
from tools.supervisor.service.server import MAX_SHARDS, MAX_UNLOAD_SECONDS
from tools.supervisor.state import RunFolder


@click.group()
def models() -> None:
    """Register models by name, version and checksum, and load them into a running fabric."""


@models.command("list")
@option("--json", "as_json", scope="models", is_flag=True, help="Print a JSON array.")
@data_dir_option
def list_models(as_json: bool, data_dir: Path | None) -> None:
    """List the models that are registered on this machine, in the order in which they were added, and those that the
    running fabric serves, with their adapters. With --json: only the registered ones."""
    registered = registry_in(data_dir).models()
    if as_json:
        click.echo(msgspec.json.encode(registered).decode())
        return
    click.echo("registered here:" if registered else "no models are registered here (kvloom models add NAME PATH)")
    for model in registered:
        click.echo(f"  {model.label:30} {model.sha256[:12]}  {model.path}")
    served = _served(data_dir)
    if served is None:
        return
    click.echo("served now:" if served else "no model is served now")
    for model in served:
        click.echo(f"  {model.name:30} {_condition(model)}")
    _list_adapters(RunFolder(choose_data_dir(data_dir, KvloomConfig())))


def _served(data_dir: Path | None) -> Sequence[ModelInfo] | None:
    """Returns what a router of the fabric that runs here serves; None if none runs. Raises CommandError if it does not
    answer."""
    if RunFolder(choose_data_dir(data_dir, KvloomConfig())).read_running() is None:
        return None
    routers = RouterFlags(data_dir).routers()

    async def ask() -> Sequence[ModelInfo]:
        async with Client(routers.any_address, client_id="models", open_channel=routers.open_channel) as client:
            return await client.list_models()

    try:
        return asyncio.run(ask())
    except KvloomError as error:
        raise CommandError(error.message) from error


def _condition(model: ModelInfo) -> str:
    """Such as: 2 shards ready, generate, version 7."""
    shards = "1 shard ready" if model.num_ready_shards == 1 else f"{model.num_ready_shards} shards ready"
    task = next((task for task in ("generate", "embed") if task in model.capabilities), "")
    version = f"version {model.version}" if model.version else ""
    return ", ".join(filter(None, (shards, task, version, "it takes no new requests" if model.withdrawn else "")))


def _list_adapters(folder: RunFolder) -> None:
    """Those of the fabric that runs here."""

    async def adapters() -> list[ListedAdapter]:
        async with local_supervisor(folder.run_dir) as supervisor:
            return await supervisor.adapters()

    for adapter in asyncio.run(adapters()):
        loaded = f"loaded on {', '.join(adapter.loaded_on)}" if adapter.loaded_on else "not loaded"
        where = f"on {len(adapter.shards)} shards, {loaded}"
        click.echo(
            f"  {full_name(adapter.model, adapter.name):30} {adapter.checksum[:12]}  rank {adapter.rank}, {where}"
        )


@models.command("add")
@click.argument("name")
@click.argument("path", type=click.Path(path_type=Path))
@option(
    "--version", "version", scope="models", default="", help="The version, which distinguishes models of the same name."
)
@data_dir_option
def add_model(name: str, path: Path, version: str, data_dir: Path | None) -> None:
    """Register the model at PATH (a directory or a .gguf file) with its checksum."""
    model = registry_in(data_dir).add(name, path, version)
    click.echo(f"added {model.label}, sha256 {model.sha256}")


@models.command("verify")
@click.argument("name", required=False)
@data_dir_option
def verify_models(name: str | None, data_dir: Path | None) -> None:
    """Compare the files of NAME (or NAME@VERSION), or of all models, with their checksums."""
    registry = registry_in(data_dir)
    for model in [registry.require(name)] if name else registry.models():
        model.verify()
        click.echo(f"{model.label}: as registered")


@models.command("remove")
@click.argument("name")
@data_dir_option
def remove_model(name: str, data_dir: Path | None) -> None:
    """Remove a model from the registry. Its files are kept."""
    click.echo(f"removed {registry_in(data_dir).remove(name).label}")


@models.command("load")
@click.argument("model", metavar="[NAME=]NAME|PATH")
@option(
    "--shards",
    scope="models",
    type=click.IntRange(1, MAX_SHARDS),
    help="The number of its shards.  [default: as configured]",
)
@fabric_options
def load_model(model: str, shards: int | None, fabric: FabricFlags) -> None:
    """Serve another model on this machine, without a restart.

    Returns when its shards are ready and the routers know them. If that fails, the other models are served as before.
    """
    wanted = flag_model(model)
    source = wanted.path if not wanted.name else f"{wanted.name}={wanted.path}"

    async def load() -> None:
        async with local_supervisor(running_folder(fabric).run_dir) as supervisor:
            await supervisor.load_model(source, shards, lambda text: click.echo(f"  {text}"))

    asyncio.run(load())
    click.echo(f"loaded {model}")


_timeout_option = option(
    "--timeout-seconds",
    scope="models",
    type=click.FloatRange(0, MAX_UNLOAD_SECONDS),
    default=600.0,
    show_default=True,
    help="How long running answers may take to end. Those that have not ended by then are broken off.",
)


@models.command("unload")
@click.argument("name")
@_timeout_option
@fabric_options
def unload_model(name: str, timeout_seconds: float, fabric: FabricFlags) -> None:
    """Stop serving a model on this machine, once its running answers have ended. Ctrl-C takes it back until then."""

    async def unload() -> None:
        async with local_supervisor(running_folder(fabric).run_dir) as supervisor:
            await supervisor.unload_model(name, timeout_seconds, lambda text: click.echo(f"  {text}"))

    asyncio.run(unload())
    click.echo(f"unloaded {name}")


@models.command("sleep")
@click.argument("name")
@_timeout_option
@fabric_options
def sleep_model(name: str, timeout_seconds: float, fabric: FabricFlags) -> None:
    """Free the memory of a model's shards on this machine, once its running answers have ended. `wake` undoes it.

    Requests for the model are refused meanwhile (503). Ctrl-C takes it back as long as answers run.
    """

    async def sleep() -> None:
        async with local_supervisor(running_folder(fabric).run_dir) as supervisor:
            await supervisor.sleep_model(name, timeout_seconds, lambda text: click.echo(f"  {text}"))

    asyncio.run(sleep())
    click.echo(f"{name} sleeps")


@models.command("wake")
@click.argument("name")
@fabric_options
def wake_model(name: str, fabric: FabricFlags) -> None:
    """Load the weights of a sleeping model again, and return when it is served."""

    async def wake() -> None:
        async with local_supervisor(running_folder(fabric).run_dir) as supervisor:
            await supervisor.wake_model(name, lambda text: click.echo(f"  {text}"))

    asyncio.run(wake())
    click.echo(f"{name} is awake")


@models.command("load-adapter")
@click.argument("model")
@click.argument("name")
@click.argument("path", type=click.Path(path_type=Path))
@fabric_options
def load_adapter(model: str, name: str, path: Path, fabric: FabricFlags) -> None:
    """Give the LoRA adapter in the directory PATH to all shards of MODEL on this machine, under the name NAME.

    Clients request it as MODEL:NAME. If a shard refuses it, no shard has it. Shards that are restarted get it again.
    """

    absolute = str(path.expanduser().absolute())

    async def load() -> None:
        async with local_supervisor(running_folder(fabric).run_dir) as supervisor:
            await supervisor.load_adapter(model, name, absolute, lambda text: click.echo(f"  {text}"))

    asyncio.run(load())
    click.echo(f"loaded {full_name(model, name)}")


@models.command("unload-adapter")
@click.argument("model")
@click.argument("name")
@option(
    "--timeout-seconds",
    scope="models",
    type=click.FloatRange(0, MAX_UNLOAD_SECONDS),
    default=UNLOAD_TIMEOUT_SECONDS,
    show_default=True,
    help="How long to wait for running answers. An adapter that still answers then goes with the last of them.",
)
@fabric_options
def unload_adapter(model: str, name: str, timeout_seconds: float, fabric: FabricFlags) -> None:
    """Take the adapter NAME from all shards of MODEL on this machine, once its running answers have ended."""

    async def unload() -> None:
        async with local_supervisor(running_folder(fabric).run_dir) as supervisor:
            await supervisor.unload_adapter(model, name, timeout_seconds, lambda text: click.echo(f"  {text}"))

    asyncio.run(unload())
    click.echo(f"unloaded {full_name(model, name)}")


def registry_in(data_dir: Path | None) -> ModelRegistry:
    return ModelRegistry(choose_data_dir(data_dir, KvloomConfig()) / "models.json")


for _command in (roll_out, roll_back, history, compare_models):
    models.add_command(_command)
