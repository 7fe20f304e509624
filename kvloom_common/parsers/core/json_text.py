"""JSON text from strings and literals."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_LITERALS: Final = {
    "true": "true",
    "false": "false",
    "null": "null",
    "True": "true",
    "False": "false",
    "None": "null",
}


def escape(text: str) -> str:
    """The text as it stands between a JSON string's quotes. Pieces may be escaped one by one."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def literal(text: str) -> str | None:
    """The JSON of a number, of a boolean or of null, as JSON or Python writes them; None for anything else."""
    return _LITERALS.get(text) or (text if _NUMBER.fullmatch(text) else None)


def allowed_types(schema: Any) -> frozenset[str] | None:
    """The JSON types that a schema allows at the top; None when it does not say."""
    if not isinstance(schema, Mapping):
        return None
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset((declared,))
    if isinstance(declared, list):
        return frozenset(name for name in declared if isinstance(name, str))
    for keyword in ("anyOf", "oneOf"):
        branches = schema.get(keyword)
        if isinstance(branches, list):
            types = [allowed_types(branch) if _is_flat(branch) else None for branch in branches]
            if any(branch is None for branch in types):
                return None
            return frozenset().union(*(branch for branch in types if branch is not None))
    choices = schema.get("enum")
    if isinstance(choices, list) and choices:
        return frozenset(_type_of(choice) for choice in choices)
    return None


def typed(text: str, types: frozenset[str]) -> str:
    """The JSON of a bare value, by the types that its schema allows. What cannot be read as one becomes a string."""
    stripped = text.strip()
    scalar = literal(stripped)
    if scalar is not None:
        kind = "null" if scalar == "null" else "boolean" if scalar in ("true", "false") else "number"
        if kind in types or (kind == "number" and "integer" in types) or "string" not in types:
            return scalar
    else:
        is_container = stripped[:1] in ("{", "[") and bool(types & {"object", "array"})
        is_quoted = stripped[:1] == '"' and "string" not in types
        if (is_container or is_quoted) and _is_json(stripped):
            return stripped
    return quote(text)


def _is_flat(schema: Any) -> bool:
    return isinstance(schema, Mapping) and "anyOf" not in schema and "oneOf" not in schema


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return "array" if isinstance(value, list) else "object" if isinstance(value, dict) else "string"


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> None:
    raise ValueError(constant)
