"""How a model's makers would have its answers generated: generation_config.json, read as vLLM reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from kvloom_common.config import GenerationDefaults, ModelConfig
from kvloom_common.text.chat_template import read_json

_NAMES: Final = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Maps its names to those of [model.defaults]; all other entries are not about sampling, or concern searches that no
engine here does."""


def with_generation_config(config: ModelConfig, folder: Path) -> GenerationDefaults:
    """The defaults of a model: those of its configuration, and for what it does not say those of
    generation_config.json, unless the configuration says to leave it. Values that no request may have count as absent.
    Raises ValueError for a file that cannot be read."""
    if not config.reads_generation_config:
        return config.defaults
    given = read_json(folder / "generation_config.json")
    changes = {
        ours: given[theirs]
        for theirs, ours in _NAMES.items()
        if getattr(config.defaults, ours) is None and theirs in given
    }
    return msgspec.structs.replace(
        config.defaults, **{name: value for name, value in changes.items() if _fits(name, value)}
    )


def _fits(name: str, value: Any) -> bool:
    try:
        msgspec.convert({name: value}, GenerationDefaults)
    except msgspec.ValidationError:
        return False
    return value is not None
