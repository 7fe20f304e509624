"""All keys of the configuration with what is said beside them: which processes read a key, its flag, its path."""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from kvloom_common.config.models import ModelConfig
from kvloom_common.config.section import AT_START, BY_SHARDS, Flag, ReadBy, RelativeTo, Section
from kvloom_common.config.tree import KvloomConfig

T = TypeVar("T")


class ConfigKey(NamedTuple):
    """A key of the configuration, outside of tables that may be repeated."""

    name: str
    """The path of the key in the file, such as `edge.resume.grace_seconds`."""
    type: Any
    """Its type, `Annotated` with its bounds."""
    default: Any
    readers: tuple[str, ...]
    """The roles whose processes apply it when they start; () and ("followed",) are those of `AT_START` and
    `FOLLOWED`."""
    flag: Flag | None


@functools.cache
def all_keys() -> Mapping[str, ConfigKey]:
    """Every key by name. A table whose keys are free, such as a plugin's settings, and a list of tables are one key
    each."""
    return {key.name: key for key in _keys_of(KvloomConfig(), "", AT_START)}


def keys_by_flag() -> Mapping[str, list[ConfigKey]]:
    """The keys that flags of `kvloom up` set, by the flag's name."""
    found: dict[str, list[ConfigKey]] = {}
    for key in all_keys().values():
        if key.flag is not None:
            found.setdefault(key.flag.name, []).append(key)
    return found


def fields_of_model(readers: ReadBy) -> Sequence[str]:
    """The fields of a model, of which there may be several, that these processes read."""
    types = _types_of(ModelConfig)
    return [name for name, kind in types.items() if (_said(kind, ReadBy) or BY_SHARDS) == readers]


def is_path(key: ConfigKey) -> bool:
    return _said(key.type, RelativeTo) is not None


def complete_paths(section: Section, base: Path) -> None:
    """Complete all relative paths in a section, and in those that it holds, by the directory of their file."""
    for name, kind in _types_of(type(section)).items():
        value = getattr(section, name)
        if path := _said(kind, RelativeTo):
            setattr(section, name, path.complete(value, base))
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, Section):
                complete_paths(inner, base)


def value_of(config: KvloomConfig, key: str) -> Any:
    """The value that a configuration has for a key."""
    return functools.reduce(getattr, key.split("."), config)


def set_value(config: KvloomConfig, key: str, value: Any) -> None:
    """Give a key of a configuration a value."""
    section, _, name = key.rpartition(".")
    setattr(value_of(config, section) if section else config, name, value)


def _keys_of(section: Section, prefix: str, readers: ReadBy) -> Iterator[ConfigKey]:
    for name, kind in _types_of(type(section)).items():
        value, said = getattr(section, name), _said(kind, ReadBy) or readers
        if isinstance(value, Section):
            yield from _keys_of(value, f"{prefix}{name}.", said)
        else:
            yield ConfigKey(f"{prefix}{name}", kind, value, said.roles, _said(kind, Flag))


@functools.cache
def _types_of(section: type[Section]) -> Mapping[str, Any]:
    hints = typing.get_type_hints(section, include_extras=True)
    return {field.name: hints[field.name] for field in msgspec.structs.fields(section)}


def said_beside(section: type[Section]) -> Mapping[str, Sequence[Any]]:
    """Returns what stands beside the type of each field of a section, the most specific last."""
    return {name: getattr(kind, "__metadata__", ()) for name, kind in _types_of(section).items()}


def _said(kind: Any, what: type[T]) -> T | None:
    """The last of what is said beside a type, which is the most specific."""
    said: Iterable[Any] = kind.__metadata__ if typing.get_origin(kind) is Annotated else ()
    return next((one for one in reversed(list(said)) if isinstance(one, what)), None)
