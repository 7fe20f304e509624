"""The TensorRT-LLM adapter over its fake library, started and closed for a test."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from kvloom_common.config import ShardConfig, TensorRtLlmConfig
from shard_server.engines.tensorrt_llm.engine import TensorRtLlmEngine
from tests.conformance.engine_driver import EngineDriver
from tests.fakes.fake_tensorrt_llm import FakeTensorRtLlm, Variant, installed_tensorrt_llm

VOCAB_SIZE = 49152
EOS = frozenset({2, 3})


def write_empty_adapter(path: Path, *, alpha: int = 1, rank: int = 4) -> Path:
    """Returns `path`, which gets an adapter without weights: the fake library reads none."""
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps({"r": rank, "lora_alpha": alpha}))
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
    variant: Variant | None = None, config: TensorRtLlmConfig | None = None, **shard_fields: Any
) -> AsyncIterator[tuple[EngineDriver, FakeTensorRtLlm]]:
    with installed_tensorrt_llm(variant) as fake:
        engine = make_tensorrt_llm_engine(config, **shard_fields)
        try:
            await engine.start()
            yield EngineDriver(engine), fake
        finally:
            await engine.close()
