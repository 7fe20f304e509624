"""Makes the engine that the configuration names from an `EngineSetup`: kvloom's own, or that of another package
(docs/how-to/plugins.md)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvloom_common.config import KvloomConfig, ShardConfig
from kvloom_common.plugins import PluginError
from kvloom_common.text.tokenizer import ModelTokenizer
from shard_server.engines.base import Engine, EngineError
from shard_server.engines.engine_kinds import ENGINES, engine_kind, imported

_METHODS: Final = ("start", "submit", "cancel", "steps", "close")
_DEFAULT_CONTEXT_TOKENS: Final = 8192
"""The context window of a model whose config.json names none."""


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


def create_engine(config: KvloomConfig, tokenizer: ModelTokenizer) -> Engine:
    """The engine, not started yet. Raises EngineError when the engine cannot serve this model, OSError or ValueError
    when the config.json of the model cannot be read, PluginError when an engine of another package does not exist or
    cannot be made."""
    model_dir = Path(config.model.path)
    setup = EngineSetup(
        model_dir,
        config.model.name,
        config.shard,
        config.shard.plugin,
        tokenizer,
        tokenizer.vocab_size,
        tokenizer.eos_token_ids,
        _max_position_embeddings(model_dir),
        config.model.max_loaded_adapters,
        config.model.max_adapter_rank,
    )
    factory = engine_kind(config.shard.engine).factory
    engine: Engine = imported(factory)(setup) if factory else plugin_engine(config.shard.engine, setup)
    return engine


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


def _max_position_embeddings(model_dir: Path) -> int:
    model_config = json.loads((model_dir / "config.json").read_bytes())
    return int(model_config.get("max_position_embeddings") or _DEFAULT_CONTEXT_TOKENS)
