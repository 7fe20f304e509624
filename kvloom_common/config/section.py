"""The parts of sections of the configuration: types of values, and marks beside the type of a key.

    port: Annotated[Port, AT_START, Flag("http-port", "The port of the HTTP API.")] = 8080

A key of a section says which processes read it (`ReadBy`; otherwise the key that holds the section says it for all of
them), which flag of `kvloom up` sets it (`Flag`) and how a relative path is completed (`FilePath` and the like). The
docstring below a key is its documentation. `kvloom_common.config.keys` reads all of that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Final, TypeVar

import msgspec
from msgspec import Meta

Port = Annotated[int, Meta(ge=0, le=65535)]
PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
Address = Annotated[str, Meta(pattern=r"^[^\s,/]+:[0-9]{1,5}$")]
"""host:port"""
CellName = Annotated[str, Meta(pattern=r"^([a-z0-9]([a-z0-9-]{0,62}[a-z0-9])?)?$")]
"""The name of a cell (docs/operate/regions.md); empty: there is but one."""


S = TypeVar("S", bound="Section")


class ConfigError(Exception):
    """The file cannot be used. The message names the file, the key and the fault."""


class Section(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The base of all sections: unknown keys are errors."""

    moved: ClassVar[Mapping[str, str]] = {}
    """Keys that a section had once, and a sentence for each that says where it went."""


def always(**values: str) -> Mapping[str, str]:
    """Returns sentences for `Section.moved`: these keys have become constants with these values."""
    return {name: f"It is always {value}: delete the line" for name, value in values.items()}


def with_constants(keys: Section, settings: type[S]) -> S:
    """Returns the settings of a part: a section's keys, and beside them the constants with which `settings` extends the
    section. What are such settings already stay as they are: tests choose their own constants."""
    return keys if isinstance(keys, settings) else settings(**msgspec.structs.asdict(keys))


@dataclasses.dataclass(frozen=True, slots=True)
class ReadBy:
    """The roles whose processes apply a new value of a key, or of the keys of a section, when they start."""

    roles: tuple[str, ...]


AT_START: Final = ReadBy(())
"""The key is about ports, names and numbers of processes, which the supervisor holds: only a new `kvloom up` applies a
new value, or, for a model, another load."""
FOLLOWED: Final = ReadBy(("followed",))
"""Processes read the stored configuration again for the key, within a second."""
BY_EDGES: Final = ReadBy(("edge",))
BY_ROUTERS: Final = ReadBy(("router",))
BY_ROUTERS_AND_EDGES: Final = ReadBy(("router", "edge"))
BY_SHARDS: Final = ReadBy(("shard",))
BY_SAFETY: Final = ReadBy(("safety",))
BY_ROUTERS_AND_SAFETY: Final = ReadBy(("router", "safety"))
BY_CONTROL: Final = ReadBy(("control",))
BY_ORCHESTRATOR: Final = ReadBy(("orchestrator",))
BY_ALL: Final = ReadBy(("edge", "router", "shard", "safety", "control", "orchestrator"))


@dataclasses.dataclass(frozen=True, slots=True)
class Flag:
    """A flag of `kvloom up` that sets a key. Its type is that of the key, its environment variable is KVLOOM_ and its
    name; one of a bool takes no value and sets what is not the default. Several keys may have the same flag, and one of
    them its help."""

    name: str
    """Without the dashes."""
    help: str = ""
    default: str = ""
    """Text for --help in place of the key's default."""
    metavar: str | None = None
    alias: str = ""
    """Another name of it."""


@dataclasses.dataclass(frozen=True, slots=True)
class RelativeTo:
    """A value that may be a relative path, and how it is completed by the directory of the file that has it."""

    complete: Callable[[str, Path], str]


def _completed(path: str, base: Path) -> str:
    return str(base / Path(path).expanduser()) if path else ""


def _completed_model(source: str, base: Path) -> str:
    """Completes the path of a file that exists; other sources may be names of models."""
    found = _completed(source, base)
    return found if source and Path(found).exists() else source


def _completed_url(url: str, base: Path) -> str:
    scheme, _, path = url.partition(":///")
    return f"sqlite:///{_completed(path, base)}" if scheme == "sqlite" and path else url


FilePath = Annotated[str, RelativeTo(_completed)]
ModelPath = Annotated[str, RelativeTo(_completed_model)]
DatabaseUrl = Annotated[str, RelativeTo(_completed_url)]
