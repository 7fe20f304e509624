"""`kvloom keys`: the API keys that clients need: of tenants, or in a file with their hashes."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click
import msgspec

from kvloom_common.access.api_keys import ApiKey, check_name, digest_of, draw_key, read_api_keys, write_api_keys
from kvloom_common.config import ConfigError, load_config
from kvloom_common.private_file import make_private_folder
from tools.cli.lazy_group import LazyGroup
from tools.failures import CommandError
from tools.options import FabricFlags, choose_data_dir, fabric_options, option
from tools.supervisor.state import RunFolder

KEYS_FILE: Final = "api_keys"
"""In the data directory."""


class _KeysGroup(LazyGroup):
    """`create`, `update`, `rotate` and `revoke` are for tenants and load gRPC; the others are below."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*super().list_commands(ctx), *self.commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return self.commands.get(cmd_name) or super().get_command(ctx, cmd_name)


@click.group(
    cls=_KeysGroup,
    commands_at={name: f"tools.cli.tenants.keys:{name}" for name in ("create", "update", "rotate", "revoke")},
)
def keys() -> None:
    """Make, list, change and revoke the keys of tenants (`kvloom up --control`).

    In a fabric without tenants, `add`, `list` and `remove` are about the keys in a file (`kvloom up --api-keys FILE`).
    """


file_option = option(
    "--file",
    "file",
    scope="keys",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file with the hashes of the keys.  [default: callers.api_keys_file, or DATA_DIR/api_keys]",
)


@keys.command()
@click.argument("name")
@file_option
@fabric_options
def add(name: str, file: Path | None, fabric: FabricFlags) -> None:
    """Make a key for NAME in the file and print it. It cannot be shown again, because the file has its hash only.

    A name may have several keys: add the new one, give it to its user, then remove the old one.
    """
    _refuse_tenants(file, fabric, "kvloom keys create --project ORG/PROJECT")
    path = _path(file, fabric)
    try:
        check_name(name)
    except ValueError as error:
        raise CommandError(str(error)) from error
    found = _read(path) if path.exists() else []
    key = draw_key()
    made = ApiKey(name, digest_of(key), datetime.datetime.now(datetime.UTC).date().isoformat())
    _write(path, [*found, made])
    click.echo(f"added key {made.key_id} of {name} to {path}", err=True)
    print(key)


@keys.command(name="list")
@option("--json", "as_json", scope="keys", is_flag=True, help="Print one JSON array.")
@option("--project", scope="keys", default="", help="Only those of this project.")
@option("--org", scope="keys", default="", help="Only those of this organisation.")
@option("--revoked", "show_revoked", scope="keys", is_flag=True, help="Revoked ones, too.")
@file_option
@fabric_options
def list_keys(
    as_json: bool,
    project: str,
    org: str,
    show_revoked: bool,
    file: Path | None,
    fabric: FabricFlags,
) -> None:
    """List the keys of tenants; in a fabric without, the names, ids and dates of those in the file."""
    if _has_tenants(file, fabric):
        from tools.cli.tenants.directory import Directory
        from tools.cli.tenants.keys import show_keys

        directory = Directory(fabric.data_dir, fabric.config_file)
        show_keys(directory, project, org, show_revoked=show_revoked, as_json=as_json)
        return
    if project or org or show_revoked:
        raise CommandError("the keys in a file have no project: this fabric has no tenants (`kvloom up --control`)")
    found = _read(_path(file, fabric))
    if as_json:
        shown = [{"name": key.name, "id": key.key_id, "created": key.created} for key in found]
        print(msgspec.json.encode(shown).decode())
        return
    width = max([4, *(len(key.name) for key in found)])
    print(f"{'name':{width}}  id        created")
    for key in found:
        print(f"{key.name:{width}}  {key.key_id}  {key.created}".rstrip())


@keys.command()
@click.argument("name")
@option("--id", "key_id", scope="keys", help="Remove only the key with this id (`kvloom keys list`).")
@file_option
@fabric_options
def remove(name: str, key_id: str | None, file: Path | None, fabric: FabricFlags) -> None:
    """Remove the keys of NAME from the file. Running processes refuse them within about a second."""
    _refuse_tenants(file, fabric, "kvloom keys revoke ID")
    path = _path(file, fabric)
    found = _read(path)
    kept = [key for key in found if key.name != name or key_id not in (None, key.key_id)]
    if len(kept) == len(found):
        which = f"{name} with the id {key_id}" if key_id else name
        raise CommandError(f"{path} has no key of {which}")
    _write(path, kept)
    print(f"removed {len(found) - len(kept)} of {len(found)} keys from {path}")


def _has_tenants(file: Path | None, fabric: FabricFlags) -> bool:
    """True when the fabric has tenants, and no file was asked for."""
    if file is not None:
        return False
    given = fabric.load_config()
    try:
        running = load_config(RunFolder(choose_data_dir(fabric.data_dir, given)).config_path)
    except ConfigError:
        return given.control.enabled
    return running.control.enabled or given.control.enabled


def _refuse_tenants(file: Path | None, fabric: FabricFlags, instead: str) -> None:
    """Raises CommandError: a key in the file would be of no use."""
    if _has_tenants(file, fabric):
        raise CommandError(f"this fabric has tenants, whose keys are not in a file: use `{instead}`")


def _path(file: Path | None, fabric: FabricFlags) -> Path:
    if file is not None:
        return file
    config = fabric.load_config()
    return Path(config.callers.api_keys_file or choose_data_dir(fabric.data_dir, config) / KEYS_FILE)


def _read(path: Path) -> list[ApiKey]:
    try:
        return read_api_keys(path)
    except ConfigError as error:
        raise CommandError(str(error)) from error


def _write(path: Path, found: Sequence[ApiKey]) -> None:
    try:
        make_private_folder(path.parent)
        write_api_keys(path, found)
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}") from error
