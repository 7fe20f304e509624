"""`kvloom secret`: makes, shows and rotates the secret by which the processes of a fabric recognise one another."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import click

from kvloom_common.config import KvloomConfig
from kvloom_common.discovery.registry import records_of
from kvloom_common.trust.identity import ISSUED_ROLES, issue_identity
from kvloom_common.trust.secret import FabricSecret, SecretError, key_id, read_secret, write_secret
from tools.fabric_trust import SECRET_FILE
from tools.failures import CommandError
from tools.options import FabricFlags, choose_data_dir, fabric_options, load_config_file, option
from tools.supervisor.state import RunFolder

SETTLE_SECONDS: Final = 3.0
"""Processes check the file every second."""
STEPS: Final = ("accept", "use", "finish")


@click.group()
def secret() -> None:
    """Make, show and rotate the secret by which the processes of a fabric recognise one another."""


@secret.command()
def new() -> None:
    """Print a new secret, for KVLOOM_FABRIC_SECRET or a file that `fabric.secret_file` names."""
    print(FabricSecret.draw().format())


@secret.command()
@option("--file", "file", scope="secret", type=click.Path(path_type=Path, dir_okay=False), help="The file to show.")
@fabric_options
def show(file: Path | None, fabric: FabricFlags) -> None:
    """Show which fabric the secret belongs to and which keys are accepted, but not the secret itself."""
    path = file or Path(_fabric_config(fabric).fabric.secret_file)
    found = _read(path)
    print(f"file      {path}")
    print(f"fabric    {found.fabric_id}")
    for number, part in enumerate(found.secrets):
        print(f"{'used' if number == 0 else 'accepted':9} {key_id(part)}")


@secret.command()
@option(
    "--step",
    scope="secret",
    type=click.Choice(STEPS),
    help="Do one step only, for a fleet: each step's file must be on all machines before the next step.",
)
@option(
    "--settle-seconds",
    scope="secret",
    type=click.FloatRange(min=0),
    default=SETTLE_SECONDS,
    show_default=True,
    help="The wait between the steps.",
)
@option("--file", "file", scope="secret", type=click.Path(path_type=Path, dir_okay=False), help="The file to rotate.")
@fabric_options
def rotate(step: str | None, settle_seconds: float, file: Path | None, fabric: FabricFlags) -> None:
    """Replace the secret of a running fabric. No stream breaks, and no answer is lost.

    The three steps: a new secret is accepted; it is used; the old one is no longer accepted. Running processes follow
    the file. Resumable answers that began under the old secret can be taken over by another edge until the last step.
    """
    config = _fabric_config(fabric)
    path = file or Path(config.fabric.secret_file)
    grace_seconds = config.resume.grace_seconds
    for number, name in enumerate(STEPS if step is None else (step,)):
        if number:
            # What was encrypted with the old secret is read for as long as a client may come back for it.
            time.sleep(settle_seconds + (grace_seconds if name == "finish" else 0.0))
        _write(path, _ROTATION[name](_read(path)))
        print(f"{name}: {_DONE[name]}", file=sys.stderr)
    print(f"{path}: {key_id(_read(path).secrets[0])} is used")


@secret.command()
@option(
    "--role",
    scope="secret",
    type=click.Choice(ISSUED_ROLES),
    default=ISSUED_ROLES[0],
    show_default=True,
    help="The role of the service.",
)
@option("--name", scope="secret", required=True, help="Its --name, which other processes demand.")
@option(
    "--file", "file", scope="secret", type=click.Path(path_type=Path, dir_okay=False), help="The file with the secret."
)
@fabric_options
def issue(role: str, name: str, file: Path | None, fabric: FabricFlags) -> None:
    """Print an identity for one service, for the file that its `fabric.secret_file` names in place of the secret.

    Who steals it can be this service, and no other process of the fabric. It ends with the secret that is used now.
    """
    config = _fabric_config(fabric)
    found = _read(file or Path(config.fabric.secret_file))
    print(issue_identity(found, role, name, records_of(config.redis.key_prefix, role, name)).format())


def _accept(found: FabricSecret) -> FabricSecret:
    if len(found.secrets) > 1:
        raise CommandError("a rotation has begun already: continue it with --step use or --step finish")
    return found.with_accepted(secrets.token_bytes(32))


def _use(found: FabricSecret) -> FabricSecret:
    if len(found.secrets) < 2:
        raise CommandError("no new secret is accepted yet: begin with --step accept")
    return found.with_used(found.secrets[-1])


_ROTATION: Final[dict[str, Callable[[FabricSecret], FabricSecret]]] = {
    "accept": _accept,
    "use": _use,
    "finish": FabricSecret.without_others,
}
_DONE: Final = {
    "accept": "a new secret is accepted",
    "use": "the new secret is used",
    "finish": "the old secret is no longer accepted",
}


def _fabric_config(fabric: FabricFlags) -> KvloomConfig:
    """That of the latest fabric with this data directory, if there was one, else the file's. It names the secret."""
    config = fabric.load_config()
    folder = RunFolder(choose_data_dir(fabric.data_dir, config))
    if not config.fabric.secret_file and folder.config_path.exists():
        config = load_config_file(folder.config_path)
    config.fabric.secret_file = config.fabric.secret_file or str(folder.data_dir / SECRET_FILE)
    return config


def _read(path: Path) -> FabricSecret:
    try:
        return read_secret(path)
    except SecretError as error:
        raise CommandError(str(error)) from error


def _write(path: Path, found: FabricSecret) -> None:
    try:
        write_secret(path, found)
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}") from error
