"""Finds the keys in which two configurations differ, and the processes that must be restarted for them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from kvloom_common.config import KvloomConfig, ModelConfig
from kvloom_common.config.keys import all_keys, fields_of_model, value_of
from kvloom_common.config.section import AT_START, BY_SHARDS

_LOADED_WITH: Final = [field for field in fields_of_model(AT_START) if field != "name"]
"""Fields of a model that only another load applies."""
_STARTED_WITH: Final = [field for field in fields_of_model(BY_SHARDS) if field != "shard"]
"""Fields that a model's shards read when they start, besides the settings of `shard`."""


_SECRET_PARTS: Final = ("url", "secret", "password", "token", "key")
"""Keys with these in their name may have passwords in their values."""


class Change(NamedTuple):
    """One key that differs."""

    key: str
    """The path of the key in the file; models.NAME.FIELD for one of a model."""
    readers: tuple[str, ...]
    """The roles whose processes apply it when they start. Empty: only a new `kvloom up` does, or, for a model's files
    and its number of shards, another load."""
    model: str = ""
    """The `model_key` of the model, of which only the shards read the key."""


def changes(old: KvloomConfig, new: KvloomConfig) -> list[Change]:
    """All keys that differ, besides which models there are."""
    plain = [
        Change(key.name, key.readers)
        for key in all_keys().values()
        if not key.name.startswith(("model.", "models")) and value_of(old, key.name) != value_of(new, key.name)
    ]
    before, after = models_by_key(old), models_by_key(new)
    of_models = [change for key in after if key in before for change in model_changes(key, before[key], after[key])]
    return [*plain, *of_models]


def shown_value(config: KvloomConfig, key: str) -> str:
    """The value of a key for people, without what may be a secret."""
    value = value_of(config, key)
    if isinstance(value, str) and value and any(part in key.rpartition(".")[2] for part in _SECRET_PARTS):
        return "(not shown)"
    return msgspec.json.encode(msgspec.to_builtins(value)).decode()


def models_by_key(config: KvloomConfig) -> dict[str, ModelConfig]:
    """The models of a file, which need not be valid."""
    first = [] if config.models and config.model == ModelConfig() else [config.model]
    return {model_key(model): model for model in (*first, *config.models)}


def model_key(model: ModelConfig) -> str:
    """Returns what tells a model from the others: its name, or its path if nothing else is said of it."""
    has_only_a_path = model.path and model == ModelConfig(path=model.path, sha256=model.sha256)
    return model.path if has_only_a_path else model.name


def model_changes(key: str, old: ModelConfig, new: ModelConfig) -> Iterable[Change]:
    for field in _LOADED_WITH:
        if getattr(old, field) != getattr(new, field):
            yield Change(f"models.{key}.{field}", AT_START.roles, key)
    for field in _STARTED_WITH:
        if getattr(old, field) != getattr(new, field):
            yield Change(f"models.{key}.{field}", BY_SHARDS.roles, key)
    counts, settings = zip(_split_shard(old.shard), _split_shard(new.shard), strict=True)
    if counts[0] != counts[1]:
        yield Change(f"models.{key}.shard.num_shards", AT_START.roles, key)
    if settings[0] != settings[1]:
        yield Change(f"models.{key}.shard", BY_SHARDS.roles, key)


def _split_shard(shard: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The number of shards, and their other settings."""
    return shard.get("num_shards"), {name: value for name, value in shard.items() if name != "num_shards"}


def changed_model(running: ModelConfig, new: ModelConfig) -> ModelConfig:
    """The running model with what its shards apply when they are restarted."""
    shard = _split_shard(new.shard)[1]
    if (num_shards := running.shard.get("num_shards")) is not None:
        shard["num_shards"] = num_shards
    values = {field: getattr(new, field) for field in _STARTED_WITH}
    return msgspec.structs.replace(running, **values | {"version": new.version or running.version, "shard": shard})


def restart_command(names: Sequence[str], running: Mapping[str, str]) -> str:
    """The command that restarts these processes. `running`: the roles of all processes by name, without Redis."""
    if set(names) >= set(running):
        return "kvloom restart --rolling"
    words: list[str] = []
    for role in dict.fromkeys(running[name] for name in names):
        of_role = [name for name in running if running[name] == role]
        words += [role] if set(names) >= set(of_role) else [name for name in of_role if name in names]
    return f"kvloom restart {' '.join(words)}"
