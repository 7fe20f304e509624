"""`kvloom backup` and `kvloom restore`: what control and the orchestrator store, as a folder of files."""

from __future__ import annotations

import datetime
import importlib.metadata
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click
import msgspec

from kvloom_common.config import KvloomConfig
from kvloom_common.private_file import make_private_folder, write_private_file
from tools.failures import CommandError
from tools.options import FabricFlags, choose_data_dir, fabric_options, load_config_file, option
from tools.supervisor.state import RunFolder

MANIFEST: Final = "manifest.json"
SERVICES: Final = ("control", "orchestrator")


class PartCopy(msgspec.Struct, frozen=True):
    """A service's part, as its module describes it (kvloom_common/database/backup.py: DatabaseCopy)."""

    file: str
    sha256: str
    num_rows: int
    lost_files: Sequence[str] = ()


class Manifest(msgspec.Struct, frozen=True):
    made_at: str
    version: str
    """The version of kvloom."""
    parts: dict[str, PartCopy]
    """By service."""


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@fabric_options
def backup(folder: Path, fabric: FabricFlags) -> None:
    """Copy what control and the orchestrator store into a new FOLDER: tenants, keys, limits and usage; responses,
    conversations, files and batches.

    The fabric may run: each database is copied as it is at one time. The fabric's secret and the keys of receipts and
    audits are files, and stay out: keep them elsewhere.
    """
    stored = _Stored(fabric)
    if folder.exists() and any(folder.iterdir()):
        raise CommandError(f"{folder} is not empty: a backup gets a folder of its own")
    try:
        make_private_folder(folder)
        parts = {name: stored.run(name, folder) for name in stored.services}
        made_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        manifest = Manifest(made_at, importlib.metadata.version("kvloom"), parts)
        # The manifest is the last file: a folder without one is no backup.
        write_private_file(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
    except OSError as error:
        raise CommandError(f"{folder} cannot be written: {error.strerror}") from error
    _show(parts)
    print(f"backed up to {folder}")


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False, exists=True))
@option("--force", scope="restore", is_flag=True, help="Replace the data that is there.")
@fabric_options
def restore(folder: Path, force: bool, fabric: FabricFlags) -> None:
    """Write a backup back, with the version of kvloom that made it. The fabric must not run.

    Data that is there is not touched without --force. Kinds of databases may differ: what SQLite had, PostgreSQL gets.
    """
    stored = _Stored(fabric)
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        raise CommandError(f"{folder} is no complete backup: {MANIFEST}: {error}") from error
    if unknown := manifest.parts.keys() - set(SERVICES):
        raise CommandError(f"{folder / MANIFEST} names services that there are not: {', '.join(sorted(unknown))}")
    if stored.is_running:
        raise CommandError("the fabric runs: stop it with `kvloom down`, and on every machine of its fleet")
    _show({name: stored.run(name, folder, part, force=force) for name, part in manifest.parts.items()})
    print(f"restored the backup of {manifest.made_at}")


class _Stored:
    """The databases of the fabric of a data directory."""

    def __init__(self, fabric: FabricFlags) -> None:
        given = fabric.load_config()
        self._folder = RunFolder(choose_data_dir(fabric.data_dir, given))
        running = self._folder.config_path
        self._config_file = running if fabric.config_file is None and running.exists() else fabric.config_file
        self._config: KvloomConfig = given if self._config_file is None else load_config_file(self._config_file)

    @property
    def is_running(self) -> bool:
        return self._folder.read_running() is not None

    @property
    def services(self) -> list[str]:
        """Those that this fabric has. Raises CommandError if it has none."""
        enabled = {"control": self._config.control.enabled, "orchestrator": self._config.orchestrator.enabled}
        # Flags of `kvloom up` are not known any more when it has ended, and its files are.
        found = [name for name in SERVICES if enabled[name] or (self._folder.data_dir / f"{name}.db").exists()]
        if not found:
            raise CommandError("this fabric stores nothing: it has neither control nor orchestrator")
        return found

    def run(self, service: str, folder: Path, part: PartCopy | None = None, *, force: bool = False) -> PartCopy:
        """Raises CommandError."""
        command = [sys.executable, "-P", "-m", f"{service}.backup", "--folder", str(folder.absolute())]
        command += ["--data-dir", str(self._folder.data_dir)]
        if self._config_file is not None:
            command += ["--config", str(self._config_file)]
        if part is not None:
            command += ["--restore", msgspec.json.encode(part).decode()]
        if force:
            command.append("--replace")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip() or "no reason was given").splitlines()[-1]
            raise CommandError(f"{service}: {last.removeprefix('error: ')}")
        return msgspec.json.decode(done.stdout, type=PartCopy)


def _show(parts: dict[str, PartCopy]) -> None:
    for name, part in parts.items():
        lost = f", {len(part.lost_files)} files whose contents were lost" if part.lost_files else ""
        print(f"{name:<14}{part.num_rows} rows{lost}")
