"""Makes a model's configuration of the flag --model."""

from __future__ import annotations

from pathlib import Path

from kvloom_common.config import ModelConfig
from shard_server.engines.torch_engine.checkpoint.converted_model import BUILTIN_NAMES


def flag_model(value: str) -> ModelConfig:
    """The model of a --model flag: NAME, PATH or NAME=PATH. Paths become absolute, because a daemon opens them from
    another directory."""
    name, equals, source = value.partition("=")
    if not equals or Path(value).expanduser().exists():
        name, source = "", value
    path = Path(source).expanduser()
    is_path = source not in BUILTIN_NAMES and path.exists()
    return ModelConfig(name=name, path=str(path.absolute()) if is_path else source)
