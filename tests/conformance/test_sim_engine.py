"""The conformance suite on the simulated engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvloom_common.config import ShardConfig, SimConfig
from shard_server.engines.base import Engine
from shard_server.engines.sim_engine import SimEngine
from tests.conformance.engine_suite import EngineSuite, OrderSuite
from tests.conformance.started_engines import StartedEngines
from tests.conformance.vision_suite import VisionSuite


class SimEngines(StartedEngines):
    def make_engine(self, request: pytest.FixtureRequest, **shard_fields: Any) -> Engine:
        sim = SimConfig(step_ms=0, prefill_tokens_per_second=1e9)
        config = ShardConfig(engine="sim", sim=sim, **{"max_batch": 16, **shard_fields})
        return SimEngine(self.model_name, config, vocab_size=49152, eos_token_ids=frozenset({2}))


class TestSimEngine(SimEngines, EngineSuite):
    def adapter_path(self, request: pytest.FixtureRequest, number: int) -> Path:
        return Path(f"adapter-{number}")


class TestSimEngineThatSees(VisionSuite):
    def make_engine(self, request: pytest.FixtureRequest, **shard_fields: Any) -> Engine:
        sim = SimConfig(step_ms=0, prefill_tokens_per_second=1e9, sees_images=True)
        config = ShardConfig(engine="sim", sim=sim, **{"max_batch": 16, **shard_fields})
        return SimEngine(self.model_name, config, vocab_size=49152, eos_token_ids=frozenset({2}))


class TestSimEngineShortestPrefillFirst(SimEngines, OrderSuite):
    def make_engine(self, request: pytest.FixtureRequest, **shard_fields: Any) -> Engine:
        return super().make_engine(request, queue_order="shortest_prefill", **shard_fields)
