"""The conformance suite on every engine there is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvloom.config import ShardConfig, SimConfig, TorchConfig
from shard_server.engines.base import Engine
from shard_server.engines.sim_engine import SimEngine
from tests.conformance.engine_suite import EngineSuite
from tests.fakes.fake_tensorrt_llm import Variant, installed_tensorrt_llm
from tests.fakes.tiny_llama import write_tiny_llama


class TestSimEngine(EngineSuite):
    def make_engine(self, request: pytest.FixtureRequest, **shard_fields: Any) -> Engine:
        sim = SimConfig(step_ms=0, prefill_tokens_per_second=1e9)
        config = ShardConfig(engine="sim", sim=sim, **{"max_batch": 16, **shard_fields})
        return SimEngine("model", config, vocab_size=49152, eos_token_ids=frozenset({2}))


class TestTorchEngine(EngineSuite):
    def make_engine(self, request: pytest.FixtureRequest, **shard_fields: Any) -> Engine:
        from shard_server.engines.torch_engine.engine import TorchEngine

        # One thread: with more, a busy machine makes every step wait for the thread that was not scheduled.
        config = ShardConfig(torch=TorchConfig(num_threads=1), **{"max_batch": 16, "num_blocks": 256, **shard_fields})
        return TorchEngine(request.getfixturevalue("model_dir"), "model", config)


class TestTorchEngineInt8(EngineSuite):
    """On a small random model: this is about the kernels' promises."""

    @pytest.fixture(scope="class")
    @classmethod
    def small_model_dir(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_tiny_llama(tmp_path_factory.mktemp("int8"), vocab_size=8192)

    def make_engine(self, request: pytest.FixtureRequest, **shard_fields: Any) -> Engine:
        from shard_server.engines.torch_engine.engine import TorchEngine

        torch = TorchConfig(num_threads=1, weights="int8")
        config = ShardConfig(torch=torch, **{"max_batch": 16, "num_blocks": 256, **shard_fields})
        return TorchEngine(request.getfixturevalue("small_model_dir"), "model", config)


class TestSimEngineShortestPrefillFirst(TestSimEngine):
    def make_engine(self, request: pytest.FixtureRequest, **shard_fields: Any) -> Engine:
        return super().make_engine(request, queue_order="shortest_prefill", **shard_fields)


class TestTorchEngineShortestPrefillFirst(TestTorchEngine):
    def make_engine(self, request: pytest.FixtureRequest, **shard_fields: Any) -> Engine:
        return super().make_engine(request, queue_order="shortest_prefill", **shard_fields)


class TestTensorRtLlmEngine(EngineSuite):
    """On a fake library: this is about the adapter."""

    @pytest.fixture(autouse=True)
    def library(self) -> Iterator[None]:
        with installed_tensorrt_llm():
            yield

    def make_engine(self, request: pytest.FixtureRequest, **shard_fields: Any) -> Engine:
        from shard_server.engines.tensorrt_llm.engine import TensorRtLlmEngine

        config = ShardConfig(engine="tensorrt_llm", **{"max_batch": 16, **shard_fields})
        return TensorRtLlmEngine(
            Path("model"), "model", config, vocab_size=49152, eos_token_ids=frozenset({2}), max_model_len=4096
        )


class TestTensorRtLlmEngineNewer(TestTensorRtLlmEngine):
    """A version that tells salts, on a model with two attention windows, with attention data parallelism."""

    @pytest.fixture(autouse=True)
    def library(self) -> Iterator[None]:
        with installed_tensorrt_llm(Variant(is_new=True, window_sizes=(4096, 512), rank=1, raises_queue_empty=True)):
            yield
