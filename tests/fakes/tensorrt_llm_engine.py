"""The TensorRT-LLM adapter over its fake library, started and closed for a test."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from kvloom_common.config import ShardConfig, TensorRtLlmConfig
from shard_server.engines.tensorrt_llm.engine import TensorRtLlmEngine
from tests.conformance.engine_driver import EngineDriver
from tests.fakes.fake_tensorrt_llm import FakeTensorRtLlm, Variant, installed_tensorrt_llm

VOCAB_SIZE = 49152
EOS = frozenset({2, 3})
HIDDEN_SIZE = 8
LORA = {"lora_target_modules": ["attn_q", "attn_v"]}
"""`options.lora_config` for the adapters that `write_adapter` writes."""


def options(**given: Any) -> TensorRtLlmConfig:
    """A configuration with these arguments of the library's LLM."""
    return TensorRtLlmConfig(options=given)


def write_model(path: Path, *, vocab_size: int = VOCAB_SIZE, num_layers: int = 1) -> Path:
    """Returns `path`, which gets a model of the smallest weights: the fake library reads none."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"vocab_size": vocab_size, "max_position_embeddings": 4096}))
    weights = {
        f"model.layers.{layer}.self_attn.{module}.weight": np.zeros((HIDDEN_SIZE, HIDDEN_SIZE), np.float32)
        for layer in range(num_layers)
        for module in ("q_proj", "k_proj", "v_proj", "o_proj")
    }
    save_file(weights, path / "model.safetensors")
    return path


def write_adapter(
    path: Path,
    *,
    alpha: int = 1,
    rank: int = 4,
    modules: Sequence[str] = ("q_proj",),
    layer: int = 0,
    hidden_size: int = HIDDEN_SIZE,
    tensors: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """Returns `path`, which gets an adapter of `write_model`'s model; `changes` are those of adapter_config.json."""
    path.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(modules)} | changes
    (path / "adapter_config.json").write_text(json.dumps(config))
    if tensors is None:
        prefix = f"base_model.model.model.layers.{layer}.self_attn"
        tensors = {
            f"{prefix}.{module}.lora_{matrix}.weight": np.full(shape, alpha, np.float32)
            for module in modules
            for matrix, shape in (("A", (rank, hidden_size)), ("B", (hidden_size, rank)))
        }
    save_file(dict(tensors), path / "adapter_model.safetensors")
    return path


def make_tensorrt_llm_engine(
    config: TensorRtLlmConfig | None = None, model_dir: Path = Path("model"), **shard_fields: Any
) -> TensorRtLlmEngine:
    shard = ShardConfig(
        engine="tensorrt_llm", tensorrt_llm=config or TensorRtLlmConfig(), **{"max_batch": 16, **shard_fields}
    )
    return TensorRtLlmEngine(model_dir, "model", shard, vocab_size=VOCAB_SIZE, eos_token_ids=EOS, max_model_len=4096)


@contextlib.asynccontextmanager
async def running_tensorrt_llm(
    variant: Variant | None = None,
    config: TensorRtLlmConfig | None = None,
    model_dir: Path = Path("model"),
    **shard_fields: Any,
) -> AsyncIterator[tuple[EngineDriver, FakeTensorRtLlm]]:
    with installed_tensorrt_llm(variant) as fake:
        engine = make_tensorrt_llm_engine(config, model_dir, **shard_fields)
        try:
            await engine.start()
            yield EngineDriver(engine), fake
        finally:
            await engine.close()
