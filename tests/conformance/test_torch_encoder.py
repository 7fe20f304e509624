"""The conformance suite's tests of embeddings on the torch engine with an encoder, which gives nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvloom_common.config import ShardConfig, TorchConfig
from shard_server.engines.base import Engine
from tests.conformance.embedding_suite import EmbeddingSuite
from tests.fakes.tiny_bert import write_tiny_bert


class TestTorchEncoder(EmbeddingSuite):
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
