"""The models in the configuration, and what holds for the shards of each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from kvloom_common.config import ConfigError, KvloomConfig, ModelConfig, ShardConfig

MAX_MODELS: Final = 256
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/@:-]{0,127}")
"""Names are part of paths of the API and of log lines."""


def configured_models(config: KvloomConfig) -> Sequence[ModelConfig]:
    """Those in `[model]`, unless it is left as it was while there are others, and `[[models]]`. Raises ConfigError if
    names are unusable or used twice. A model may share names with an earlier one that it succeeds."""
    first = [] if config.models and config.model == ModelConfig() else [config.model]
    models = [*first, *config.models]
    if len(models) > MAX_MODELS:
        raise ConfigError(f"models: there are {len(models)}, and at most {MAX_MODELS} are allowed")
    taken: dict[str, ModelConfig] = {}
    for model in models:
        for name in (model.name, *model.aliases):
            if not _NAME.fullmatch(name):
                raise ConfigError(
                    f"models: {name[:128]!r} is no name: up to 128 letters, digits and any of '._/@:-' are allowed"
                )
            holder = taken.setdefault(name, model)
            if holder is not model and not (name in model.aliases and model.succeeds == holder.name):
                raise ConfigError(f"models: two have the name or alias {name!r}")
        adapters = [adapter.name for adapter in model.adapters]
        if len(set(adapters)) < len(adapters):
            raise ConfigError(f"model {model.name}: two adapters have the same name")
        shard_config(config, model)
    _check_labels(config.models)
    return models


def _check_labels(models: Sequence[ModelConfig]) -> None:
    labels: dict[str, str] = {}
    for model in models:
        other = labels.setdefault(model_label(model.name), model.name)
        if other != model.name:
            raise ConfigError(f"models: the shards of {other!r} and {model.name!r} would have the same names")


def model_label(name: str) -> str:
    """How a model is called in the names of its shards: in lower-case letters, digits and '-'."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def find_configured(config: KvloomConfig, name: str) -> ModelConfig:
    """The model of this name; "": the only one. Raises ConfigError."""
    models = configured_models(config)
    if not name and len(models) == 1:
        return models[0]
    found = next((model for model in models if model.name == name), None)
    if found is None:
        what = f"has no model {name!r}" if name else "has several models, and none was chosen"
        raise ConfigError(f"the configuration {what}: there are {', '.join(model.name for model in models)}")
    return found


def config_of_model(config: KvloomConfig, name: str) -> KvloomConfig:
    """The configuration of a shard that serves the model of this name ("": the only one): its `model` and `shard` are
    those of the model. Raises ConfigError."""
    model = find_configured(config, name)
    changed = msgspec.structs.replace(config)
    changed.model, changed.models, changed.shard = model, [], shard_config(config, model)
    return changed


def shard_config(config: KvloomConfig, model: ModelConfig) -> ShardConfig:
    """`[shard]`, with what `model.shard` says otherwise. Raises ConfigError."""
    if not model.shard:
        return config.shard
    try:
        return msgspec.convert(merged_settings(msgspec.to_builtins(config.shard), model.shard), ShardConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"model {model.name}: shard: {error}") from error


def num_configured_shards(config: KvloomConfig) -> int:
    """How many shards `kvloom up` starts, of all models. Raises ConfigError."""
    return sum(shard_config(config, model).num_started for model in configured_models(config))


def merged_settings(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the changes, also within tables that both have."""
    merged = dict(base)
    for key, value in changes.items():
        inner = merged.get(key)
        merged[key] = (
            merged_settings(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
        )
    return merged
