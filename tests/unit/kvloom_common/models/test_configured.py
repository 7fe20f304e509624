"""The models in the configuration."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvloom_common.config import ConfigError, KvloomConfig, ShardConfig, load_config
from kvloom_common.models.configured import config_of_model, configured_models, num_configured_shards

TWO = """
[shard]
engine = "sim"
num_shards = 3
block_size = 32

[[models]]
name = "large"
path = "/models/large"
aliases = ["default"]
defaults = { temperature = 0.5, max_tokens = 100 }

[[models]]
name = "small"
path = "/models/small"
version = "2"

[models.shard]
num_shards = 1
max_model_len = 2048
sim = { step_ms = 7.0 }
"""


def read(folder: Path, text: str) -> KvloomConfig:
    path = folder / "kvloom.toml"
    path.write_text(text)
    return load_config(path)


def test_a_models_shards_have_the_common_settings_but_for_its_own(tmp_path: Path) -> None:
    """What is the same for all models is written once."""
    config = read(tmp_path, TWO)
    assert [model.name for model in configured_models(config)] == ["large", "small"]
    assert num_configured_shards(config) == 4
    small = config_of_model(config, "small")
    assert (small.model.path, small.model.version, small.models) == ("/models/small", "2", [])
    assert (small.shard.num_shards, small.shard.max_model_len, small.shard.block_size) == (1, 2048, 32)
    assert (small.shard.sim.step_ms, small.shard.sim.prefill_tokens_per_second) == (
        7.0,
        config.shard.sim.prefill_tokens_per_second,
    )
    large = config_of_model(config, "large")
    assert (large.shard.num_shards, large.shard.sim.step_ms) == (3, config.shard.sim.step_ms)
    assert large.model.defaults.temperature == 0.5


def test_a_single_model_needs_no_list() -> None:
    """A fabric with one model stays as simple as it was."""
    config = KvloomConfig()
    assert configured_models(config) == [config.model]
    assert config_of_model(config, "").model is config.model
    assert config_of_model(config, "").shard is config.shard


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "small"', 'name = "large"', "two have the name or alias 'large'"),
        ('name = "small"', 'name = "default"', "two have the name or alias 'default'"),
        ('name = "small"', 'name = "a b"', "'a b' is no name"),
        ('name = "small"', 'name = ""', "'' is no name"),
        ("num_shards = 1", "num_shards = -1", r"model small: shard: .*`\$.num_shards`"),
        ("num_shards = 1", "num_chards = 1", "model small: shard: .*num_chards"),
        ("step_ms = 7.0", 'step_ms = "7"', r"model small: shard: .*`\$.sim.step_ms`"),
    ],
)
def test_a_faulty_model_is_refused_by_name(tmp_path: Path, old: str, new: str, message: str) -> None:
    """The mistake must be found before any process starts, and named."""
    config = read(tmp_path, TWO.replace(old, new))
    with pytest.raises(ConfigError, match=message):
        configured_models(config)


@pytest.mark.parametrize("name", ["", "other"])
def test_a_shard_must_be_told_one_of_several_models(tmp_path: Path, name: str) -> None:
    """A shard that is started by hand must not serve a model that nobody asked for."""
    with pytest.raises(ConfigError, match="there are large, small"):
        config_of_model(read(tmp_path, TWO), name)


def test_only_a_successor_may_have_the_names_of_another_model(tmp_path: Path) -> None:
    """A typing mistake must not take a model's requests away."""
    text = TWO + '\n[[models]]\nname = "new"\npath = "/models/new"\naliases = ["large", "default"]\n'
    with pytest.raises(ConfigError, match="name or alias 'large'"):
        configured_models(read(tmp_path, text))
    assert len(configured_models(read(tmp_path, text + 'succeeds = "large"\n'))) == 3
    with pytest.raises(ConfigError, match="name or alias 'large'"):
        configured_models(read(tmp_path, text + 'succeeds = "small"\n'))


@pytest.mark.parametrize(
    ("engine", "cores", "expected"), [("torch", 1, 1), ("torch", 2, 1), ("torch", 3, 2), ("sim", 1, 2)]
)
def test_a_small_machine_gets_one_shard(
    monkeypatch: pytest.MonkeyPatch, engine: str, cores: int, expected: int
) -> None:
    """Two on two cores took 1.36 GB while idle, and each had one core."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(cores)))
    config = KvloomConfig(shard=ShardConfig(engine=engine))
    assert (config.shard.num_started, num_configured_shards(config)) == (expected, expected)
    assert ShardConfig(engine=engine, num_shards=3).num_started == 3
