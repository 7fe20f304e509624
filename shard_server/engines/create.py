"""Creates the engine that the configuration names. Heavy engines are imported only when they are used."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import structlog

from kvloom_common.config import KvloomConfig
from kvloom_common.text.tokenizer import ModelTokenizer
from shard_server.engines.base import Engine
from shard_server.engines.engine_plugins import EngineSetup, plugin_engine
from shard_server.engines.sim_engine import DEFAULT_MAX_MODEL_LEN, SimEngine
from shard_server.engines.sim_stamps import stamp_token_ids

log = structlog.get_logger()


def create_engine(config: KvloomConfig, tokenizer: ModelTokenizer) -> Engine:
    """The engine, not started yet. Raises EngineError when the engine cannot serve this model, OSError or ValueError
    when the config.json of the model cannot be read, PluginError when an engine of another package does not exist or
    cannot be made."""
    model_dir = Path(config.model.path)
    if config.shard.engine == "torch":
        from shard_server.engines.torch_engine.engine import TorchEngine

        def on_load_progress(message: str) -> None:
            log.info("model_load_advanced", model=config.model.name, stage=message)

        return TorchEngine(
            model_dir,
            config.model.name,
            config.shard,
            max_loaded_adapters=config.model.max_loaded_adapters,
            max_adapter_rank=config.model.max_adapter_rank,
            on_load_progress=on_load_progress,
        )
    if config.shard.engine == "tensorrt_llm":
        from shard_server.engines.tensorrt_llm.engine import TensorRtLlmEngine

        return TensorRtLlmEngine(
            model_dir,
            config.model.name,
            config.shard,
            vocab_size=tokenizer.vocab_size,
            eos_token_ids=tokenizer.eos_token_ids,
            max_model_len=_max_position_embeddings(model_dir),
        )
    if config.shard.engine != "sim":
        setup = EngineSetup(
            model_dir,
            config.model.name,
            config.shard,
            config.shard.plugin,
            tokenizer.vocab_size,
            tokenizer.eos_token_ids,
            _max_position_embeddings(model_dir),
        )
        return plugin_engine(config.shard.engine, setup)
    return SimEngine(
        config.model.name,
        config.shard,
        tokenizer.vocab_size,
        tokenizer.eos_token_ids,
        _max_position_embeddings(model_dir),
        stamps=_stamps(tokenizer) if config.shard.sim.stamp_tokens else (),
        opening=tokenizer.encode_now(config.shard.sim.opening),
        max_loaded_adapters=config.model.max_loaded_adapters,
    )


@functools.lru_cache(maxsize=1)
def _stamps(tokenizer: ModelTokenizer) -> tuple[int, ...]:
    """Cached, because hundreds of engines may share a process and its tokenizer."""
    return stamp_token_ids(tokenizer.token_texts)


def _max_position_embeddings(model_dir: Path) -> int:
    model_config = json.loads((model_dir / "config.json").read_bytes())
    return int(model_config.get("max_position_embeddings", DEFAULT_MAX_MODEL_LEN))
