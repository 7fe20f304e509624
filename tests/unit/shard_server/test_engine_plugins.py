"""Engines of other packages: what is refused when a shard starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvloom_common.config import ShardConfig
from kvloom_common.plugins import PluginError
from kvloom_common.text.tokenizer import ModelTokenizer
from shard_server.engines.base import EngineError
from shard_server.engines.create import EngineSetup, plugin_engine
from tests.fakes.plugin_site import PluginSite
from tests.fakes.tiny_tokenizer import byte_level_tokenizer

GROUP = "kvloom.engines"
TOKENIZER = ModelTokenizer(byte_level_tokenizer())


def setup(**settings: object) -> EngineSetup:
    return EngineSetup(Path("model"), "model", ShardConfig(), settings, TOKENIZER, 1000, frozenset({2}), 4096)


def test_an_engine_checks_its_own_settings(plugin_site: PluginSite) -> None:
    """kvloom does not know the keys of [shard.plugin]; a misspelt one must still be refused by name."""
    plugin_site.install_example(GROUP)
    assert plugin_engine("echo", setup(step_seconds=0.5)).info.model == "model"
    with pytest.raises(PluginError, match=r"engine 'echo' cannot be made: ValidationError: .*step_sec"):
        plugin_engine("echo", setup(step_sec=0.5))


def test_what_lacks_a_method_is_refused_at_the_start(plugin_site: PluginSite) -> None:
    """The first request would otherwise end the shard."""
    plugin_site.install(
        "acme_engine", GROUP, {"acme": "acme_engine:Acme"}, "class Acme:\n    def __init__(self, _): ..."
    )
    with pytest.raises(PluginError, match=r"'acme' \(Acme\) has no method start, submit, cancel, steps, close\."):
        plugin_engine("acme", setup())


def test_an_engine_error_stays_one(plugin_site: PluginSite) -> None:
    """It is how every engine says that it cannot serve a model."""
    source = "from shard_server.engines import base\ndef make(setup): raise base.EngineError(f'no {setup.model_name}')"
    plugin_site.install("acme_engine", GROUP, {"acme": "acme_engine:make"}, source)
    with pytest.raises(EngineError, match="no model"):
        plugin_engine("acme", setup())
