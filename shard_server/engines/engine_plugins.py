"""Says from what an engine is made, and makes those of other packages (docs/how-to/plugins.md)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvloom_common.config import ShardConfig
from kvloom_common.plugins import PluginError
from kvloom_common.text.tokenizer import ModelTokenizer
from shard_server.engines.base import Engine, EngineError
from shard_server.engines.engine_kinds import ENGINES

_METHODS: Final = ("start", "submit", "cancel", "steps", "close")


@dataclasses.dataclass(frozen=True, slots=True)
class EngineSetup:
    """Holds all that an engine is made from, kvloom's own or that of another package."""

    model_dir: Path
    """The directory with the model's files."""
    model_name: str
    """`EngineInfo.model`."""
    shard: ShardConfig
    """Block size, number of blocks, batch and window, as every engine has them."""
    settings: Mapping[str, Any]
    """The table `[shard.plugin]`, which only the engine knows and checks."""
    tokenizer: ModelTokenizer
    """The model's, which the shard closes."""
    vocab_size: int
    eos_token_ids: frozenset[int]
    max_model_len: int
    """The model's own context window; `shard.max_model_len` may make it smaller."""
    max_loaded_adapters: int = 0
    """How many LoRA adapters may be in memory at the same time. 0: none."""
    max_adapter_rank: int = 0


def plugin_engine(name: str, setup: EngineSetup) -> Engine:
    """The engine of a plugin, not started yet. Raises PluginError, and EngineError when it cannot serve this model."""
    factory = ENGINES.load(name)
    try:
        engine = factory(setup)
    except EngineError:
        raise
    except Exception as error:
        raise PluginError(f"The engine {name!r} cannot be made: {type(error).__name__}: {error}") from error
    missing = [method for method in _METHODS if not callable(getattr(engine, method, None))]
    if missing:
        raise PluginError(f"The engine {name!r} ({type(engine).__name__}) has no method {', '.join(missing)}.")
    return engine
