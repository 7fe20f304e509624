"""Torch engines of the conformance suite's classes, which share the loaded models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvloom_common.config import ShardConfig, TorchConfig
from lab.shallow_model import write_shallow_model
from shard_server.engines.base import Engine
from tests.fakes.peft_adapter import write_peft_adapter
from tests.fakes.tiny_llama import write_tiny_llama

NUM_LAYERS = 4
"""Layers are alike: what holds for a few holds for thirty, and a step with a few still takes a millisecond. Steps of a
tiny model are so short that the engine is ahead of a test that counts them."""


class TorchEngines:
    """A subclass says which model its engines compute with."""

    torch_fields: ClassVar[dict[str, Any]] = {}
    model_name: str
    """That of the conformance suite."""

    @pytest.fixture(autouse=True)
    def lent_runner(self, load_runner: Callable[..., Any]) -> None:
        self.load_runner = load_runner

    @pytest.fixture(scope="class")
    @classmethod
    def torch_model_dir(cls, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
        raise NotImplementedError

    def adapter_path(self, request: pytest.FixtureRequest, number: int) -> Path:
        path: Path = request.getfixturevalue("tmp_path") / f"adapter-{number}"
        return write_peft_adapter(request.getfixturevalue("torch_model_dir"), path, seed=number, size=0.3)

    def make_engine(self, request: pytest.FixtureRequest, **shard_fields: Any) -> Engine:
        from shard_server.engines.torch_engine.engine import TorchEngine

        # One thread: with more, a busy machine makes every step wait for the thread that was not scheduled. A start
        # computes the largest prefill chunk of a prompt several times: a small one, which also cuts the longer prompts.
        fields: dict[str, Any] = {"max_batch": 16, "num_blocks": 256, "max_prefill_tokens_per_step": 48} | shard_fields
        config = ShardConfig(torch=TorchConfig(num_threads=1, **self.torch_fields), **fields)
        model_dir = request.getfixturevalue("torch_model_dir")
        return TorchEngine(model_dir, self.model_name, config, load_runner=self.load_runner)


class BuiltInTorchEngines(TorchEngines):
    """On the built-in model."""

    @pytest.fixture(scope="class")
    @classmethod
    def torch_model_dir(cls, model_dir: Path) -> Path:
        return model_dir


class ShallowTorchEngines(TorchEngines):
    """On the first layers of the built-in model."""

    @pytest.fixture(scope="class")
    @classmethod
    def torch_model_dir(cls, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_shallow_model(model_dir, tmp_path_factory.mktemp("shallow") / "model", NUM_LAYERS)


class TinyTorchEngines(TorchEngines):
    """On a small random model."""

    @pytest.fixture(scope="class")
    @classmethod
    def torch_model_dir(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_tiny_llama(tmp_path_factory.mktemp("small"), vocab_size=8192)
