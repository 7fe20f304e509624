"""Configuration files are read strictly: a typo must not silently mean the default."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvloom_common.config import ConfigError, KvloomConfig, dump_config, load_config


def test_no_file_gives_the_defaults() -> None:
    """`kvloom up` works without a file."""
    assert load_config(None) == KvloomConfig()


def test_a_toml_file_overrides_what_it_names(tmp_path: Path) -> None:
    """A file may contain only a part of a section."""
    path = tmp_path / "kvloom.toml"
    path.write_text('[edge]\nport = 9000\n[shard]\nengine = "sim"\n[shard.sim]\nstep_ms = 5\n')
    config = load_config(path)
    assert (config.edge.port, config.shard.engine, config.shard.sim.step_ms) == (9000, "sim", 5.0)
    assert config.router == KvloomConfig().router


def test_what_is_dumped_is_loaded_again(tmp_path: Path) -> None:
    """`kvloom up` hands the resolved tree to its children as one JSON file."""
    config = KvloomConfig(data_dir="somewhere")
    dump_config(config, tmp_path / "config.json")
    assert load_config(tmp_path / "config.json") == config


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[edge]\nprot = 1\n", "prot"),
        ("[edge]\nport = 70000\n", "edge.port"),
        ('[shard]\nqueue_order = "lifo"\n', "shard.queue_order"),
        ("[edge\n", "kvloom.toml"),
        ("[[router.brownout.steps]]\nmax_token = 5\n", "max_token"),
        ("[[router.brownout.steps]]\n", "it does nothing"),
        ('[[router.brownout.steps]]\nshed = ["bulk"]\n', "shed"),
        ('[[router.brownout.steps]]\nshed = ["batch"]\napplies_to = ["interactive"]\n', "exempts"),
        ("[router.brownout]\ntarget = 0.5\n", "router.brownout.target"),
        ("[router.brownout]\nslow_window_seconds = 5\n", "six times min_step_seconds: set that"),
        ("[router.health]\nnum_probes = 5\n", "It is always 3: delete the line"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    """The message must lead to the line at fault."""
    path = tmp_path / "kvloom.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_config(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    """A mistyped --config must not start a fleet with defaults."""
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        load_config(tmp_path / "absent.toml")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("[edge]\ncors_origin = []", "Did you mean cors_origins?"),
        ("[resume]\ngrace-second = 1", "Did you mean grace_seconds?"),
        ("[edg]\nport = 1", "Did you mean edge?"),
        ("max_body_bytes = 3", "It is a key of edge."),
        ('[[models]]\nalias = ["x"]', "Did you mean aliases?"),
    ],
)
def test_an_unknown_key_is_told_which_one_was_meant(tmp_path: Path, text: str, hint: str) -> None:
    """Most of them are misspelt, or in another section."""
    path = tmp_path / "kvloom.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(hint)):
        load_config(path)


def test_a_key_that_is_like_no_other_gets_no_guess(tmp_path: Path) -> None:
    """A wrong guess would be worse than none."""
    path = tmp_path / "kvloom.toml"
    path.write_text("[shard]\nquux = 1")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert "mean" not in str(caught.value)
