"""Configuration files: read strictly, and written for the processes that `kvloom up` starts."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Final

import msgspec

from kvloom_common.config.section import ConfigError
from kvloom_common.config.tree import KvloomConfig
from kvloom_common.private_file import write_private_file


def load_config(path: Path | None) -> KvloomConfig:
    """Read a .toml or .json file. None gives the defaults. Raises ConfigError."""
    if path is None:
        return KvloomConfig()
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"The configuration file {path} cannot be read: {error.strerror}.") from error
    try:
        if path.suffix == ".json":
            return msgspec.json.decode(raw, type=KvloomConfig)
        return msgspec.toml.decode(raw, type=KvloomConfig)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"The configuration file {path} is not valid: {error}{meant_key(str(error), KvloomConfig)}"
        ) from error


def dump_config(config: KvloomConfig, path: Path) -> None:
    """Write the whole tree as JSON for the processes that `kvloom up` starts. Only this user can read it, because the
    URL of Redis may have a password."""
    write_private_file(path, msgspec.json.format(msgspec.json.encode(config), indent=2))


_UNKNOWN_KEY: Final = re.compile(r"Object contains unknown field `(?P<key>[^`]*)`(?: - at `\$\.?(?P<place>[^`]*)`)?")


def meant_key(message: str, root: type) -> str:
    """Says what the user may have meant by a key that does not exist: the end of the message that names it. "" if it
    names none, or nothing is like it. A section says where its former keys went in `moved`."""
    unknown = _UNKNOWN_KEY.fullmatch(message)
    if unknown is None:
        return ""
    place = [name for name in re.split(r"[.\[]", unknown["place"] or "") if name and not name.endswith("]")]
    section: type | None = root
    for name in place:
        section = _section(section, name) if section is not None else None
    if section is None:
        return ""
    moved = getattr(section, "moved", {}).get(unknown["key"])
    if moved is not None:
        return f". {moved}."
    keys = [field.encode_name for field in msgspec.structs.fields(section)]
    near = difflib.get_close_matches(unknown["key"].replace("-", "_").lower(), keys, 1, 0.75)
    if near:
        return f". Did you mean {near[0]}?"
    elsewhere = [name for name in keys if (inner := _section(section, name)) and _has_key(inner, unknown["key"])]
    return f". It is a key of {', '.join(elsewhere)}." if elsewhere else ""


def _section(section: type, name: str) -> type | None:
    """The section that a key of another one holds; None if it holds none."""
    info = msgspec.inspect.type_info(section)
    assert isinstance(info, msgspec.inspect.StructType)
    for field in info.fields:
        if field.encode_name == name:
            return _struct_in(field.type)
    return None


def _has_key(section: type, key: str) -> bool:
    return any(field.encode_name == key for field in msgspec.structs.fields(section))


def _struct_in(info: msgspec.inspect.Type) -> type | None:
    """The struct that a value is, or that a list or table of them has."""
    if isinstance(info, msgspec.inspect.StructType):
        return info.cls
    if isinstance(info, msgspec.inspect.UnionType):
        return next(filter(None, map(_struct_in, info.types)), None)
    if isinstance(info, msgspec.inspect.ListType):
        return _struct_in(info.item_type)
    return _struct_in(info.value_type) if isinstance(info, msgspec.inspect.DictType) else None
