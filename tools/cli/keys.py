"""`kvloom keys`: the API keys that clients need, in a file with their hashes."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click
import msgspec

from kvloom.access.api_keys import ApiKey, check_name, digest_of, draw_key, read_api_keys, write_api_keys
from kvloom.config import ConfigError
from tools.failures import CommandError
from tools.options import choose_data_dir, config_option, data_dir_option, load_config_file, option

KEYS_FILE: Final = "api_keys"
"""In the data directory."""


@click.group()
def keys() -> None:
    """Add, list and remove the API keys that clients need (`kvloom up --api-keys FILE`)."""


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
@data_dir_option
@config_option
def add(name: str, file: Path | None, data_dir: Path | None, config_file: Path | None) -> None:
    """Make a key for NAME and print it. It cannot be shown again, because the file has its hash only.

    A name may have several keys: add the new one, give it to its user, then remove the old one.
    """
    path = _path(file, data_dir, config_file)
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
@file_option
@data_dir_option
@config_option
def list_keys(as_json: bool, file: Path | None, data_dir: Path | None, config_file: Path | None) -> None:
    """List the names, ids and dates of the keys."""
    found = _read(_path(file, data_dir, config_file))
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
@data_dir_option
@config_option
def remove(name: str, key_id: str | None, file: Path | None, data_dir: Path | None, config_file: Path | None) -> None:
    """Remove the keys of NAME. Running processes refuse them within about a second."""
    path = _path(file, data_dir, config_file)
    found = _read(path)
    kept = [key for key in found if key.name != name or key_id not in (None, key.key_id)]
    if len(kept) == len(found):
        which = f"{name} with the id {key_id}" if key_id else name
        raise CommandError(f"{path} has no key of {which}")
    _write(path, kept)
    print(f"removed {len(found) - len(kept)} of {len(found)} keys from {path}")


def _path(file: Path | None, data_dir: Path | None, config_file: Path | None) -> Path:
    if file is not None:
        return file
    config = load_config_file(config_file)
    return Path(config.callers.api_keys_file or choose_data_dir(data_dir, config) / KEYS_FILE)


def _read(path: Path) -> list[ApiKey]:
    try:
        return read_api_keys(path)
    except ConfigError as error:
        raise CommandError(str(error)) from error


def _write(path: Path, found: Sequence[ApiKey]) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_api_keys(path, found)
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}") from error
