"""The fabric's secret, as commands and the supervisor use it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvloom_common.config import ConfigError, KvloomConfig, load_config
from kvloom_common.trust.fabric_trust import NO_SECRET, FabricTrust, load_trust
from kvloom_common.trust.secret import ENVIRONMENT_VARIABLE, SecretError, made_or_read
from tools.failures import CommandError
from tools.supervisor.state import RunFolder

SECRET_FILE: Final = "secret"
"""In the data directory."""


def provide_secret(config: KvloomConfig, data_dir: Path) -> None:
    """Name the secret in the data directory, which is made at the first start, unless the configuration or the
    environment has one. Raises CommandError."""
    if config.fabric.secret_file or os.environ.get(ENVIRONMENT_VARIABLE):
        return
    path = data_dir / SECRET_FILE
    try:
        made_or_read(path)
    except SecretError as error:
        raise CommandError(str(error)) from error
    config.fabric.secret_file = str(path)


def trust_of(config: KvloomConfig, roles: Sequence[str] = ("tools",), name: str = "") -> FabricTrust:
    """Raises CommandError."""
    try:
        return load_trust(config, roles, name or f"kvloom {os.getpid()}")
    except SecretError as error:
        raise CommandError(str(error)) from error


def trust_of_running(folder: RunFolder) -> FabricTrust:
    """The trust of the fabric that runs with this data directory; none if its configuration is gone. Raises
    CommandError."""
    try:
        config = load_config(folder.config_path)
    except ConfigError:
        return NO_SECRET
    return trust_of(config)
