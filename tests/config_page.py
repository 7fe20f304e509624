"""Writes the parts of docs/reference/configuration.md that derive from the definition of the keys.

It is called as `python -m tests.config_page`."""

from __future__ import annotations

import ast
import functools
import inspect
import json
import re
import textwrap
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from kvloom_common.config import KvloomConfig
from kvloom_common.config.keys import said_beside
from kvloom_common.config.section import AT_START, BY_ALL, FOLLOWED, Flag, ReadBy, Section

PAGE: Final = Path(__file__).parents[1] / "docs" / "reference" / "configuration.md"
_WIDTH: Final = 116
_ROLES: Final = {
    AT_START.roles: "`kvloom down` and `up`; of a model's files: `kvloom models unload NAME`, then `kvloom reload`",
    FOLLOWED.roles: "the reload",
}

_PROCESSES: Final = {
    "edge": "edges",
    "router": "routers",
    "shard": "shards",
    "safety": "the safety service",
    "control": "the control service",
    "orchestrator": "the orchestrator",
}


def page_with_derived_parts(page: str) -> str:
    for name, text in (("keys", "\n".join(_keys())), ("tables", _tables()), ("readers", _readers())):
        begin, end = f"<!-- derived: {name} -->\n", "<!-- end -->"
        head, found, rest = page.partition(begin)
        assert found, f"docs/reference/configuration.md has no {begin}"
        page = f"{head}{begin}\n{text}\n\n{end}{rest.partition(end)[2]}"
    return page


def _keys() -> Iterator[str]:
    yield "```toml"
    yield from _section(KvloomConfig(), "")
    yield "```"


def _section(section: Section, prefix: str) -> Iterator[str]:
    """The plain keys of a section, then the sections that it holds, as TOML wants them."""
    inner: list[tuple[str, Section]] = []
    documents, kinds = _documents(type(section)), said_beside(type(section))
    for name, said in kinds.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            inner.append((f"{prefix}{name}", value))
            continue
        flag = next((f" Flag: --{one.name}." for one in said if isinstance(one, Flag)), "")
        if text := (documents.get(name, "") + flag).strip():
            yield from textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
        yield f"# {name} =" if value is None else f"{name} = {_toml(value)}"
    for name, value in inner:
        yield ""
        yield from textwrap.wrap(_about(type(value)), _WIDTH, initial_indent="# ", subsequent_indent="# ")
        yield f"[{name}]"
        yield from _section(value, f"{name}.")


def _toml(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, Section):
        shown = ((name, getattr(value, name)) for name in value.__struct_fields__)
        changed = [f"{name} = {_toml(one)}" for name, one in shown if one != getattr(type(value), name, None)]
        return f"{{ {', '.join(changed)} }}"
    return json.dumps(value)


def _tables() -> str:
    """The keys of tables that may be repeated."""
    return "\n\n".join(_table(name, section) for name, section in _repeated(KvloomConfig, ""))


def _table(name: str, section: type[Section]) -> str:
    documents = _documents(section)
    rows = [
        f"| `{field.name}` | {_default(field)} | {documents.get(field.name, '').replace('|', chr(92) + '|')} |"
        for field in msgspec.structs.fields(section)
    ]
    return f"`[[{name}]]`: {_about(section)}\n\n| key | default | |\n|---|---|---|\n" + "\n".join(rows)


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    made = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    if made is None or isinstance(made, Section):
        return "–"
    return f"`{_toml(made)}`"


def _repeated(section: type[Section], prefix: str) -> Iterator[tuple[str, type[Section]]]:
    for field in msgspec.structs.fields(section):
        kind = typing.get_type_hints(section)[field.name]
        held = list(_sections_in(kind))
        for one in held:
            name = f"{prefix}{field.name}"
            if kind is one:
                yield from _repeated(one, f"{name}.")
            elif name != "models":
                yield name, one
                yield from _repeated(one, f"{name}.")


def _sections_in(kind: Any) -> Iterator[type[Section]]:
    if isinstance(kind, type) and issubclass(kind, Section):
        yield kind
    for one in typing.get_args(kind):
        yield from _sections_in(one)


def _readers() -> str:
    by_roles: dict[tuple[str, ...], list[str]] = {}
    for name, roles in _said_readers(KvloomConfig, ""):
        by_roles.setdefault(roles, []).append(f"`{name}`")
    rows = [f"| {', '.join(names)} | {_remedy(roles)} |" for roles, names in by_roles.items()]
    return "| keys | applied by |\n|---|---|\n" + "\n".join(rows)


def _remedy(roles: tuple[str, ...]) -> str:
    if len(roles) == len(BY_ALL.roles):
        return "a restart of all processes"
    return _ROLES.get(roles) or f"a restart of {' and '.join(_PROCESSES[role] for role in roles)}"


def _said_readers(section: type[Section], prefix: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    for name, said in said_beside(section).items():
        kind = typing.get_type_hints(section)[name]
        is_section = isinstance(kind, type) and issubclass(kind, Section)
        for one in said:
            if isinstance(one, ReadBy):
                yield f"{prefix}{name}{'.*' if is_section else ''}", one.roles
        if is_section:
            yield from _said_readers(kind, f"{prefix}{name}.")


def _about(section: type) -> str:
    return re.sub(r"\s+", " ", section.__doc__ or "")


@functools.cache
def _documents(section: type) -> Mapping[str, str]:
    """The docstrings below the fields of a section, and of those that it extends."""
    found: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if base is Section or not issubclass(base, Section):
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for before, node in zip(definition.body, definition.body[1:], strict=False):
            match before, node:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = re.sub(r"\s+", " ", text).strip()
    return found


if __name__ == "__main__":
    PAGE.write_text(page_with_derived_parts(PAGE.read_text()))
