"""The conformance suite on every engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvloom_common.config import ShardConfig, SimConfig, TensorRtLlmConfig, TensorRtLoraConfig, TorchConfig
from shard_server.engines.base import Engine
from shard_server.engines.sim_engine import SimEngine
from tests.conformance.embedding_suite import EmbeddingSuite
from tests.conformance.engine_suite import EngineSuite, OrderSuite
from tests.fakes.fake_tensorrt_llm import IN_1_2, IN_NEWEST, installed_tensorrt_llm
from tests.fakes.peft_adapter import write_peft_adapter
from tests.fakes.tensorrt_llm_engine import write_empty_adapter
from tests.fakes.tiny_bert import write_tiny_bert
from tests.fakes.tiny_llama import write_tiny_llama


class TestSimEngine(EngineSuite):
    def make_engine(self, request: pytest.FixtureRequest, **shard_fields: Any) -> Engine:
        sim = SimConfig(step_ms=0, prefill_tokens_per_second=1e9)
        config = ShardConfig(engine="sim", sim=sim, **{"max_batch": 16, **shard_fields})
        return SimEngine(self.model_name, config, vocab_size=49152, eos_token_ids=frozenset({2}))

    def adapter_path(self, request: pytest.FixtureRequest, number: int) -> Path:
        return Path(f"adapter-{number}")


class TorchEngines:
    """Those of one class share the loaded model."""

    @pytest.fixture(autouse=True)
    def lent_runner(self, load_runner: Callable[..., Any]) -> None:
        self.load_runner = load_runner

    def make_torch_engine(self, model_dir: Path, torch_fields: dict[str, Any], shard_fields: dict[str, Any]) -> Engine:
        from shard_server.engines.torch_engine.engine import TorchEngine

        # One thread: with more, a busy machine makes every step wait for the thread that was not scheduled. A start
        # computes the largest prefill chunk of a prompt several times: a small one, which also cuts the longer prompts.
        fields = {"max_batch": 16, "num_blocks": 256, "max_prefill_tokens_per_step": 48} | shard_fields
        config = ShardConfig(torch=TorchConfig(num_threads=1, **torch_fields), **fields)
        return TorchEngine(model_dir, self.model_name, config, load_runner=self.load_runner)


def random_adapter(request: pytest.FixtureRequest, model_fixture: str, number: int) -> Path:
    path: Path = request.getfixturevalue("tmp_path") / f"adapter-{number}"
    return write_peft_adapter(request.getfixturevalue(model_fixture), path, seed=number, size=0.3)


class BuiltInTorchEngines(TorchEngines):
    """The torch engine on the built-in model."""

    def adapter_path(self, request: pytest.FixtureRequest, number: int) -> Path:
        return random_adapter(request, "model_dir", number)

    def make_engine(self, request: pytest.FixtureRequest, **shard_fields: Any) -> Engine:
        return self.make_torch_engine(request.getfixturevalue("model_dir"), {}, shard_fields)


class TestTorchEngine(BuiltInTorchEngines, EngineSuite):
    pass


class SmallTorchEngineSuite(TorchEngines, EngineSuite):
    """The torch engine on a small random model."""

    torch_fields: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(scope="class")
    @classmethod
    def small_model_dir(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_tiny_llama(tmp_path_factory.mktemp("small"), vocab_size=8192)

    def adapter_path(self, request: pytest.FixtureRequest, number: int) -> Path:
        return random_adapter(request, "small_model_dir", number)

    def make_engine(self, request: pytest.FixtureRequest, **shard_fields: Any) -> Engine:
        return self.make_torch_engine(request.getfixturevalue("small_model_dir"), self.torch_fields, shard_fields)


class TestTorchEngineInt8(SmallTorchEngineSuite):
    """Checks what the kernels promise."""

    torch_fields: ClassVar[dict[str, Any]] = {"weights": "int8"}

    def make_engine(self, request: pytest.FixtureRequest, **shard_fields: Any) -> Engine:
        return super().make_engine(request, **shard_fields)


class TestTorchEncoder(EmbeddingSuite):
    """The torch engine on an encoder, which only gives embeddings."""

    @pytest.fixture(scope="class")
    @classmethod
    def small_encoder_dir(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_tiny_bert(tmp_path_factory.mktemp("encoder"), vocab_size=8192)

    def make_engine(self, request: pytest.FixtureRequest, **shard_fields: Any) -> Engine:
        from shard_server.engines.torch_engine.engine import TorchEngine

        fields = {"max_batch": 16, "max_prefill_tokens_per_step": 48} | shard_fields
        config = ShardConfig(torch=TorchConfig(num_threads=1), **fields)
        return TorchEngine(request.getfixturevalue("small_encoder_dir"), self.model_name, config)


class TestTorchEncoderShortestFirst(TestTorchEncoder):
    def make_engine(self, request: pytest.FixtureRequest, **shard_fields: Any) -> Engine:
        return super().make_engine(request, queue_order="shortest_prefill", **shard_fields)


class TestSimEngineShortestPrefillFirst(TestSimEngine):
    def make_engine(self, request: pytest.FixtureRequest, **shard_fields: Any) -> Engine:
        return super().make_engine(request, queue_order="shortest_prefill", **shard_fields)


class TestTorchEngineShortestPrefillFirst(BuiltInTorchEngines, OrderSuite):
    """On the built-in model: steps of a small one are so short that the engine is ahead of the test that counts
    them."""

    def make_engine(self, request: pytest.FixtureRequest, **shard_fields: Any) -> Engine:
        return super().make_engine(request, queue_order="shortest_prefill", **shard_fields)


class TestTensorRtLlmEngine(EngineSuite):
    """The adapter over a fake of release 1.2.1."""

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
