"""The conformance suite on the engine of another package: that of docs/how-to/plugins.md, or the one that
KVLOOM_CONFORMANCE_ENGINE names (docs/how-to/plugins.md, "An engine")."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvloom_common.config import KvloomConfig, ModelConfig, ShardConfig
from kvloom_common.text.tokenizer import ModelTokenizer
from shard_server.engines.base import Engine
from shard_server.engines.create import EngineSetup, create_engine, plugin_engine
from tests.conformance.engine_suite import EngineSuite
from tests.fakes.plugin_site import PluginSite
from tests.fakes.tiny_tokenizer import byte_level_tokenizer

NAME = os.environ.get("KVLOOM_CONFORMANCE_ENGINE", "")
MODEL = os.environ.get("KVLOOM_CONFORMANCE_MODEL", "")
SETTINGS = os.environ.get("KVLOOM_CONFORMANCE_SETTINGS", "" if NAME else '{"step_seconds": 0}')


class TestPluginEngine(EngineSuite):
    @pytest.fixture(autouse=True)
    def example(self, plugin_site: PluginSite) -> None:
        if not NAME:
            plugin_site.install_example("kvloom.engines")

    def make_engine(self, request: pytest.FixtureRequest, **shard_fields: Any) -> Engine:
        name, settings = NAME or "echo", json.loads(SETTINGS or "{}")
        shard = ShardConfig(engine=name, plugin=settings, **{"max_batch": 16, **shard_fields})
        if MODEL:
            config = KvloomConfig(model=ModelConfig(name=self.model_name, path=MODEL), shard=shard)
            return create_engine(config, ModelTokenizer.load(Path(MODEL)))
        tokenizer = ModelTokenizer(byte_level_tokenizer())
        setup = EngineSetup(Path("model"), self.model_name, shard, settings, tokenizer, 49152, frozenset({2}), 4096)
        return plugin_engine(name, setup)
