"""The conformance suite on the adapter to TensorRT-LLM, over a fake of the library."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvloom_common.config import ShardConfig, TensorRtLlmConfig
from shard_server.engines.base import Engine
from tests.conformance.engine_suite import EngineSuite
from tests.fakes.fake_tensorrt_llm import IN_1_2, IN_NEWEST, installed_tensorrt_llm
from tests.fakes.tensorrt_llm_engine import LORA, write_adapter


class TestTensorRtLlmEngine(EngineSuite):
    """Release 1.2.1."""

    variant = IN_1_2
    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def library(self) -> Iterator[None]:
        with installed_tensorrt_llm(self.variant):
            yield

    def make_engine(self, request: pytest.FixtureRequest, **shard_fields: Any) -> Engine:
        from shard_server.engines.tensorrt_llm.engine import TensorRtLlmEngine

        tensorrt_llm = TensorRtLlmConfig(options=self.options)
        config = ShardConfig(engine="tensorrt_llm", tensorrt_llm=tensorrt_llm, **{"max_batch": 16, **shard_fields})
        return TensorRtLlmEngine(
            Path("model"), self.model_name, config, vocab_size=49152, eos_token_ids=frozenset({2}), max_model_len=4096
        )


class TestTensorRtLlmEngineNewest(TestTensorRtLlmEngine):
    """The newest release, with adapters and a sampler that applies all parameters but min_tokens."""

    variant = IN_NEWEST
    options: ClassVar[dict[str, Any]] = {"lora_config": LORA}

    def adapter_path(self, request: pytest.FixtureRequest, number: int) -> Path:
        return write_adapter(request.getfixturevalue("tmp_path") / f"adapter-{number}", alpha=number)
