"""JSON Schemas of typed structs. Their fields are described by the texts that stand below them in the source."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import re
import sys
from collections.abc import Iterable
from typing import Any

import msgspec

from edge_http.openapi.common_fields import COMMON_FIELDS

Json = dict[str, Any]
_TEMPLATE = "#/components/schemas/{name}"


def schemas_of(types: Iterable[Any]) -> tuple[list[Json], Json]:
    """Return the schema of each type, and the components to which they refer, by name."""
    wanted = list(types)
    schemas, components = msgspec.json.schema_components(wanted, ref_template=_TEMPLATE)
    for struct in _structs_in(wanted):
        component = components.get(struct.__name__) or components.get(_qualified(struct))
        if component is not None:
            texts = field_texts(struct)
            for name, about in component.get("properties", {}).items():
                text = texts.get(name) or COMMON_FIELDS.get(name)
                if text:
                    component["properties"][name] = {**about, "description": text}
            if "description" in component and not struct.__doc__:
                del component["description"]
    return list(schemas), dict(components)


def field_texts(struct: type) -> dict[str, str]:
    """Return what the source says below each field, also of the classes from which the struct inherits."""
    found: dict[str, str] = {}
    for kind in reversed(struct.__mro__):
        if kind is not msgspec.Struct and issubclass(kind, msgspec.Struct):
            found |= _texts_in(kind.__module__).get(kind.__name__, {})
    return found


@functools.cache
def _texts_in(module: str) -> dict[str, dict[str, str]]:
    """Returns what the source says below the fields of a module's classes, by class. A struct that was made by a
    function has none."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: _texts_of(node) for node in tree.body if isinstance(node, ast.ClassDef)}


def _texts_of(definition: ast.ClassDef) -> dict[str, str]:
    return {
        statement.target.id: " ".join(below.value.value.split())
        for statement, below in itertools.pairwise(definition.body)
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    }


def _structs_in(types: Iterable[Any]) -> set[type]:
    found: set[type] = set()
    waiting: list[Any] = list(msgspec.inspect.multi_type_info(types))
    while waiting:
        info = waiting.pop()
        if isinstance(info, msgspec.inspect.StructType):
            if info.cls in found:
                continue
            found.add(info.cls)
            waiting += [field.type for field in info.fields]
        elif isinstance(info, msgspec.inspect.Type):
            for name in info.__struct_fields__:
                value = getattr(info, name)
                waiting += value if isinstance(value, tuple) else [value]
    return found


def _qualified(struct: type) -> str:
    """Returns the name that msgspec gives to structs of which several have one name."""
    return re.sub(r"[^a-zA-Z0-9.\-_]", "_", f"{struct.__module__}.{struct.__qualname__}")
