"""`--profile`: a name, or a file that describes another model on another machine."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tools.failures import CommandError
from tools.simulate.fleet.fleet_model import PROFILES, Profile


def load_profile(name_or_path: str) -> Profile:
    """Raises CommandError."""
    if name_or_path in PROFILES:
        return PROFILES[name_or_path]
    path = Path(name_or_path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CommandError(
            f"--profile {name_or_path}: neither {', '.join(PROFILES)} nor a file that can be read "
            f"({error.strerror or error})"
        ) from error
    decode = msgspec.toml.decode if path.suffix.lower() == ".toml" else msgspec.json.decode
    try:
        return decode(content, type=Profile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CommandError(f"{path}: {error}") from error
