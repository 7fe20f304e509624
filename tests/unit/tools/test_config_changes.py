"""Which changed key needs what: a table, and that no key is forgotten."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from kvloom_common.config import KvloomConfig, ModelConfig
from kvloom_common.config.keys import all_keys, set_value, value_of
from kvloom_common.config.section import FOLLOWED
from tools.supervisor.config_changes import (
    Change,
    changed_model,
    changes,
    model_key,
    restart_command,
)
from tools.supervisor.process_specs import ROLES


def toml(text: str) -> KvloomConfig:
    return msgspec.toml.decode(text, type=KvloomConfig)


@pytest.mark.parametrize(
    ("text", "key", "readers"),
    [
        ("[edge]\nmax_body_bytes = 7", "edge.max_body_bytes", ["edge"]),
        ("[resume]\ngrace_seconds = 7", "resume.grace_seconds", ["router", "edge"]),
        ("[edge]\ntrusted_proxies = ['10.0.0.0/8']", "edge.trusted_proxies", ["router", "edge"]),
        ("[router.placement]\npolicy = 'round_robin'", "router.placement.policy", ["router"]),
        ("[shard.torch.speculation]\nmax_draft_tokens = 2", "shard.torch.speculation.max_draft_tokens", ["shard"]),
        ("[shard.plugin]\na = {b = 1}", "shard.plugin", ["shard"]),
        ("[safety]\npolicy_file = '/p'", "safety.policy_file", ["safety"]),
        ("[safety]\naudit_dir = '/p'", "safety.audit_dir", ["router", "safety"]),
        ("[safety]\nanswer_mode = 'off'", "safety.answer_mode", ["router"]),
        ("[callers]\nanonymous = 'shared'", "callers.anonymous", ROLES),
        ("[log]\nlevel = 'debug'", "log.level", ROLES),
        ("[router]\nhost = '0.0.0.0'", "router.host", []),
        ("[shard]\nnum_shards = 5", "shard.num_shards", []),
        ("[redis]\nurl = 'redis://x'", "redis.url", []),
        ("[metrics]\nport = 9000", "metrics.port", []),
        ("[fabric]\nroles = ['edge']", "fabric.roles", []),
        ("data_dir = '/d'", "data_dir", []),
        ("[model]\naliases = ['x']", "models.smollm2-135m-instruct.aliases", ["shard"]),
        (
            "[model]\nreads_generation_config = false",
            "models.smollm2-135m-instruct.reads_generation_config",
            ["shard"],
        ),
        ("[model]\nsha256 = 'x'", "models.smollm2-135m-instruct.sha256", []),
        ("[model.shard]\nnum_shards = 2", "models.smollm2-135m-instruct.shard.num_shards", []),
        ("[model.shard]\nmax_batch = 2", "models.smollm2-135m-instruct.shard", ["shard"]),
    ],
)
def test_a_changed_key_names_the_processes_that_read_it(text: str, key: str, readers: Sequence[str]):
    """A restart that is not named leaves an old value in use, and one that is named in vain costs time."""
    (change,) = changes(KvloomConfig(), toml(text))
    assert (change.key, list(change.readers)) == (key, list(readers))
    assert changes(toml(text), toml(text)) == []


def test_every_key_of_the_configuration_has_an_answer():
    """A new section without one would break every reload."""
    for key in all_keys().values():
        assert set(key.readers) <= {*ROLES, *FOLLOWED.roles}
        assert key.name.split(".")[0] != "edge" or "edge" in key.readers or not key.readers


def test_a_value_is_taken_over_without_its_neighbours():
    """The neighbours were completed at the start: ports, for example."""
    running, given = toml("[router]\nport = 4711\nmax_attempts = 3"), toml("[router]\nmax_attempts = 9")
    set_value(running, "router.max_attempts", value_of(given, "router.max_attempts"))
    assert (running.router.port, running.router.max_attempts) == (4711, 9)


def test_a_running_model_keeps_its_files_and_its_number_of_shards():
    """They were found, or chosen by a flag, when it was loaded."""
    running = ModelConfig(name="m", path="/found", sha256="1", version="7", shard={"num_shards": 3, "max_batch": 1})
    changed = changed_model(running, ModelConfig(name="m", aliases=["x"], shard={"num_shards": 1, "block_size": 32}))
    assert changed == msgspec.structs.replace(running, aliases=["x"], shard={"num_shards": 3, "block_size": 32})


def test_models_are_told_apart_by_name_or_path():
    """A model of which only the path is given has the default's name."""
    assert model_key(ModelConfig(path="/m/a")) == "/m/a"
    assert model_key(ModelConfig(name="a", path="/m/a")) == "a"
    other = KvloomConfig(models=[ModelConfig(path="/m/b", aliases=["x"], name="b")])
    assert changes(KvloomConfig(), other) == []  # another model, which is no change of a key
    assert changes(other, other) == []
    assert Change("k", ()).model == ""


@pytest.mark.parametrize(
    ("names", "command"),
    [
        (["edge-0"], "edge-0"),
        (["edge-0", "edge-1"], "edge"),
        (["router", "edge-1"], "router edge-1"),
        (["safety", "router", "edge-0", "edge-1"], "--rolling"),
    ],
)
def test_the_shortest_command_is_named(names: Sequence[str], command: str):
    """People type it."""
    running = {"safety": "safety", "router": "router", "edge-0": "edge", "edge-1": "edge"}
    assert restart_command(names, running) == f"kvloom restart {command}"
