"""Reads the JSON files of a model, which come from anywhere, and checks their numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from shard_server.engines.base import EngineError

_MAX_SIZE: Final = 2**27
_MAX_SIZES: Final = {"num_hidden_layers": 4096, "hidden_size": 2**20, "vocab_size": 2**24}
"""A larger value is a mistake, and would take the memory of the machine before a weight is read."""
MAX_MESSAGE_CHARS: Final = 500


def read_json(path: Path) -> Any:
    """Raises EngineError."""
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise EngineError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise EngineError(f"{path}: not JSON ({error})") from error


def read_object(path: Path) -> dict[str, Any]:
    """Raises EngineError."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise EngineError(f"{path}: must hold a JSON object")
    return content


def positive(content: dict[str, Any], key: str, default: int | None = None) -> int:
    """A positive integer. Raises KeyError if it is missing and has no default, and ValueError."""
    value = content.get(key)
    if value is None:
        if default is None:
            raise KeyError(key)
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} must be a positive integer, not {value!r}")
    if value > _MAX_SIZES.get(key, _MAX_SIZE):
        raise ValueError(f"{key} is larger than that of any model: {value}")
    return value
