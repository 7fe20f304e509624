"""The TensorRT-LLM adapter over its fake library, started and closed for a test."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from kvloom.config import ShardConfig, TensorRtLlmConfig
from shard_server.engines.tensorrt_llm.engine import TensorRtLlmEngine
from tests.conformance.engine_driver import EngineDriver
from tests.fakes.fake_tensorrt_llm import FakeTensorRtLlm, Variant, installed_tensorrt_llm

VOCAB_SIZE = 49152
EOS = frozenset({2, 3})


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
