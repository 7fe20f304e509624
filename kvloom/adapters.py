"""LoRA adapters of models, as clients, edges and routers know them: small changes of a model's weights, each with a
name of its own, which a request may ask for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

MAX_ADAPTERS: Final = 1024
"""Clients see at most so many adapters of one model."""
MAX_NAMED: Final = 8
"""How many adapters an error names."""


class Adapter(NamedTuple):
    """Identifies the adapter that a request runs with. Another one of the same name has another checksum."""

    name: str
    checksum: str


def full_name(model: str, adapter: str) -> str:
    """The name by which clients always can request an adapter; the model's own without one."""
    return f"{model}:{adapter}" if adapter else model


def adapter_names(adapters: Mapping[str, Iterable[str]]) -> dict[str, tuple[str, str]]:
    """The names by which adapters can be requested → (model, adapter). `adapters`: those of each model. An adapter's
    own name is among them unless several models have one of this name. Callers must see that models, aliases and routes
    of the same name have precedence."""
    names: dict[str, tuple[str, str]] = {}
    models_of: dict[str, list[str]] = {}
    for model, own in adapters.items():
        for adapter in own:
            names[full_name(model, adapter)] = (model, adapter)
            models_of.setdefault(adapter, []).append(model)
    for adapter, models in models_of.items():
        if len(models) == 1:
            names.setdefault(adapter, (models[0], adapter))
    return names


def unknown_name(name: str, adapters: Mapping[str, Iterable[str]]) -> str:
    """Why no model and no adapter has this name, as a sentence. `adapters`: those of each model, which may be none."""
    model = max((model for model in adapters if name.startswith(f"{model}:")), key=len, default=None)
    if model is not None:
        wanted = name.removeprefix(f"{model}:")
        return f"The model '{model}' has no adapter '{_shown(wanted)}'; {_listed(adapters[model])}."
    same = [full_name(model, name) for model, own in adapters.items() if name in own]
    if len(same) > 1:
        return f"Several models have an adapter '{_shown(name)}': name one of {', '.join(same[:MAX_NAMED])}."
    return f"The model '{_shown(name)}' does not exist."


def _listed(adapters: Iterable[str]) -> str:
    names = sorted(adapters)
    more = ", and others" if len(names) > MAX_NAMED else ""
    return f"it has {', '.join(names[:MAX_NAMED])}{more}" if names else "it has none"


def _shown(name: str) -> str:
    return name if len(name) <= 128 else name[:128] + "…"
