"""`kvloom models`: registers the models on this machine with names, versions and checksums."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from kvloom.config import KvloomConfig
from tools.models.registry import ModelRegistry
from tools.options import choose_data_dir, data_dir_option, option


@click.group()
def models() -> None:
    """Register models by name, version and checksum. `kvloom up --model NAME` serves one."""


@models.command("list")
@option("--json", "as_json", scope="models", is_flag=True, help="Print a JSON array.")
@data_dir_option
def list_models(as_json: bool, data_dir: Path | None) -> None:
    """List the registered models in the order in which they were added."""
    registered = registry_in(data_dir).models()
    if as_json:
        click.echo(msgspec.json.encode(registered).decode())
        return
    for model in registered:
        click.echo(f"{model.label:32} {model.sha256[:12]}  {model.path}")
    if not registered:
        click.echo("no models are registered (kvloom models add NAME PATH)")


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


def registry_in(data_dir: Path | None) -> ModelRegistry:
    return ModelRegistry(choose_data_dir(data_dir, KvloomConfig()) / "models.json")
