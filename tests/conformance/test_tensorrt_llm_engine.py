"""The conformance suite on the adapter to TensorRT-LLM, over a fake of the library."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvloom_common.config import ShardConfig, TensorRtLlmConfig, TensorRtLoraConfig
from shard_server.engines.base import Engine
from tests.conformance.engine_suite import EngineSuite
from tests.fakes.fake_tensorrt_llm import IN_1_2, IN_NEWEST, installed_tensorrt_llm
from tests.fakes.tensorrt_llm_engine import write_empty_adapter


class TestTensorRtLlmEngine(EngineSuite):
    """Release 1.2.1."""

    variant = IN_1_2
    penalties = False
    lora: ClassVar[TensorRtLoraConfig] = TensorRtLoraConfig()

    @pytest.fixture(autouse=True)
    def library(self) -> Iterator[None]:
        with installed_tensorrt_llm(self.variant):
            yield

    def make_engine(self, request: pytest.FixtureRequest, **shard_fields: Any) -> Engine:
        from shard_server.engines.tensorrt_llm.engine import TensorRtLlmEngine

        tensorrt_llm = TensorRtLlmConfig(penalties=self.penalties, lora=self.lora)
        config = ShardConfig(engine="tensorrt_llm", tensorrt_llm=tensorrt_llm, **{"max_batch": 16, **shard_fields})
        return TensorRtLlmEngine(
            Path("model"), self.model_name, config, vocab_size=49152, eos_token_ids=frozenset({2}), max_model_len=4096
        )


class TestTensorRtLlmEngineNewest(TestTensorRtLlmEngine):
    """The newest release, with adapters and a sampler that applies all parameters."""

    variant = IN_NEWEST
    penalties = True
    lora: ClassVar[TensorRtLoraConfig] = TensorRtLoraConfig(enabled=True, target_modules=["attn_q"])

    def adapter_path(self, request: pytest.FixtureRequest, number: int) -> Path:
        return write_empty_adapter(request.getfixturevalue("tmp_path") / f"adapter-{number}", alpha=number)
