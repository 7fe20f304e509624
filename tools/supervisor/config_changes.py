"""Finds the keys in which two configurations differ, and the processes that must be restarted for a changed key.
Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from kvloom_common.config import KvloomConfig, ModelConfig, Section
from tools.supervisor.process_specs import ROLES

_ALL: Final = ROLES
_NONE: Final[tuple[str, ...]] = ()
FOLLOWED: Final = ("followed",)
"""Processes read the stored configuration again for these keys, within a second."""
_READERS: Final[Mapping[str, tuple[str, ...]]] = {
    "data_dir": _NONE,
    "edge": ("edge",),
    "edge.host": _NONE,
    "edge.port": _NONE,
    "edge.num_edges": _NONE,
    "edge.colocate": _NONE,
    "edge.trusted_proxies": ("router", "edge"),
    "router": ("router",),
    "router.host": _NONE,
    "router.port": _NONE,
    "router.num_routers": _NONE,
    "router.classes": ("router", "edge"),
    "router.receipts": ("router", "edge", "shard"),
    "router.result_cache.enabled": ("router", "edge"),
    "shard": ("shard",),
    "shard.engine": _NONE,  # another engine may need files of the model that were not converted
    "shard.host": _NONE,
    "shard.num_shards": _NONE,
    "shard.sim.shards_per_process": _NONE,
    "safety": ("safety",),
    "safety.host": _NONE,
    "safety.port": _NONE,
    "safety.discover": _NONE,
    "safety.answer_mode": ("router",),
    "safety.on_unavailable": ("router",),
    "safety.patience_seconds": ("router",),
    "control": ("router", "edge"),
    "control.enabled": _NONE,
    "control.operator_organisation": FOLLOWED,
    "control.host": _NONE,
    "control.port": _NONE,
    "control.database_url": ("control",),
    "control.usage_record_days": ("control",),
    "control.budget_alert_percents": ("control",),
    "control.webhook_urls": ("control",),
    "control.webhook_secret_file": ("control",),
    "control.witness": ("edge",),
    "fabric": _NONE,
    "callers": _ALL,
    "tls": _ALL,
    "tls.certificate_file": _NONE,  # with it the address that clients are told becomes https
    "tls.key_file": _NONE,
    "redis": _NONE,
    "routes": ("router", "edge"),
    "shadows": ("router",),
    "metrics": _NONE,
    "log": _ALL,
}
"""The roles whose processes read a key, or the keys below it; the longest entry counts. Without a reader, the key is
about ports, names and numbers of processes, which the supervisor holds, and only a new `kvloom up` applies it."""

_CARD_FIELDS: Final = ("version", "aliases", "succeeds", "owned_by", "tool_parser", "reasoning_parser", "defaults")
"""A model's shards read these when they start, and give them to routers and edges."""
_ADAPTER_FIELDS: Final = ("max_loaded_adapters", "max_adapter_rank")
"""A model's shards read these when they start, besides those and the adapters, which a reload applies at once."""


class Change(NamedTuple):
    """One key that differs."""

    key: str
    """The key as in the file. A model's is models.NAME.FIELD."""
    readers: tuple[str, ...]
    """The roles whose processes apply it when they start. Empty: only a new `kvloom up` does, or, for a model's files
    and its number of shards, another load."""
    model: str = ""
    """The `model_key` of the model, of which only the shards read the key."""


def changes(old: KvloomConfig, new: KvloomConfig) -> list[Change]:
    """All keys that differ, besides which models there are."""
    plain = [
        Change(key, readers_of(key))
        for section in KvloomConfig.__struct_fields__
        if section not in ("model", "models")
        for key in _different(section, getattr(old, section), getattr(new, section))
    ]
    before, after = models_by_key(old), models_by_key(new)
    of_models = [change for key in after if key in before for change in model_changes(key, before[key], after[key])]
    return [*plain, *of_models]


def readers_of(key: str) -> tuple[str, ...]:
    while key not in _READERS:
        key = key.rpartition(".")[0]
    return _READERS[key]


def _different(key: str, old: Any, new: Any) -> Iterable[str]:
    """Tables whose keys are free, such as a plugin's settings, count as one value."""
    if isinstance(old, Section):
        for field in old.__struct_fields__:
            yield from _different(f"{key}.{field}", getattr(old, field), getattr(new, field))
    elif old != new:
        yield key


def models_by_key(config: KvloomConfig) -> dict[str, ModelConfig]:
    """The models of a file, which need not be valid."""
    first = [] if config.models and config.model == ModelConfig() else [config.model]
    return {model_key(model): model for model in (*first, *config.models)}


def model_key(model: ModelConfig) -> str:
    """Returns what tells a model of the configuration from the others: its name, or its path if nothing else is said of
    it."""
    has_only_a_path = model.path and model == ModelConfig(path=model.path, sha256=model.sha256)
    return model.path if has_only_a_path else model.name


def model_changes(key: str, old: ModelConfig, new: ModelConfig) -> Iterable[Change]:
    for field in ("path", "sha256"):
        if getattr(old, field) != getattr(new, field):
            yield Change(f"models.{key}.{field}", _NONE, key)
    for field in (*_CARD_FIELDS, *_ADAPTER_FIELDS):
        if getattr(old, field) != getattr(new, field):
            yield Change(f"models.{key}.{field}", ("shard",), key)
    counts, settings = zip(_split_shard(old.shard), _split_shard(new.shard), strict=True)
    if counts[0] != counts[1]:
        yield Change(f"models.{key}.shard.num_shards", _NONE, key)
    if settings[0] != settings[1]:
        yield Change(f"models.{key}.shard", ("shard",), key)


def _split_shard(shard: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The number of shards, and their other settings."""
    return shard.get("num_shards"), {name: value for name, value in shard.items() if name != "num_shards"}


def apply_change(config: KvloomConfig, new: KvloomConfig, key: str) -> None:
    """Give a key of `config`, outside of its models, the value that it has in `new`."""
    *sections, name = key.split(".")
    target: Any = config
    source: Any = new
    for section in sections:
        target, source = getattr(target, section), getattr(source, section)
    setattr(target, name, getattr(source, name))


def changed_model(running: ModelConfig, new: ModelConfig) -> ModelConfig:
    """The running model with what its shards apply when they are restarted."""
    shard = _split_shard(new.shard)[1]
    if (num_shards := running.shard.get("num_shards")) is not None:
        shard["num_shards"] = num_shards
    values = {field: getattr(new, field) for field in (*_CARD_FIELDS, *_ADAPTER_FIELDS)}
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
