"""Configuration files: read strictly, and written for the processes that `kvloom up` starts."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvloom_common.config.section import ConfigError
from kvloom_common.config.tree import KvloomConfig
from kvloom_common.private_file import write_private_file
from kvloom_common.unknown_key import meant_key


def load_config(path: Path | None) -> KvloomConfig:
    """Read a .toml or .json file. None gives the defaults. Raises ConfigError."""
    if path is None:
        return KvloomConfig()
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"The configuration file {path} cannot be read: {error.strerror}.") from error
    try:
        if path.suffix == ".json":
            return msgspec.json.decode(raw, type=KvloomConfig)
        return msgspec.toml.decode(raw, type=KvloomConfig)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"The configuration file {path} is not valid: {error}{meant_key(str(error), KvloomConfig)}"
        ) from error


def dump_config(config: KvloomConfig, path: Path) -> None:
    """Write the whole tree as JSON for the processes that `kvloom up` starts. Only this user can read it, because the
    URL of Redis may have a password."""
    write_private_file(path, msgspec.json.format(msgspec.json.encode(config), indent=2))
