"""Creates the engine that the configuration names, kvloom's own or a plugin's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from kvloom_common.config import KvloomConfig
from kvloom_common.text.tokenizer import ModelTokenizer
from shard_server.engines.base import Engine
from shard_server.engines.engine_kinds import engine_kind, imported
from shard_server.engines.engine_plugins import EngineSetup, plugin_engine

_DEFAULT_CONTEXT_TOKENS: Final = 8192
"""The context window of a model whose config.json names none."""


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


def _max_position_embeddings(model_dir: Path) -> int:
    model_config = json.loads((model_dir / "config.json").read_bytes())
    return int(model_config.get("max_position_embeddings") or _DEFAULT_CONTEXT_TOKENS)
