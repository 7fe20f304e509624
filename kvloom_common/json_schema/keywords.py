"""The keywords of JSON Schema: which a guide follows, which say nothing about values, and the forms of older drafts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from kvloom.guide import MAX_MULTIPLE, digits_of_multiple
from kvloom_common.json_schema.objects import Losses
from kvloom_common.json_schema.patterns import PatternError, translated

TYPES: Final = ("object", "array", "string", "number", "integer", "boolean", "null")
FORMATS: Final = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
)
"""Those that are enforced. All others are annotations, as the standard has it."""
_SHORTEST_TIMES: Final = {"date-time": 20, "time": 9, "date": 10}

OBJECT_KEYWORDS: Final = frozenset(
    ("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties")
)
ARRAY_KEYWORDS: Final = frozenset(("items", "prefixItems", "minItems", "maxItems"))
STRING_KEYWORDS: Final = frozenset(("minLength", "maxLength", "pattern", "format"))
NUMBER_KEYWORDS: Final = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))


def _is_schema(value: Any) -> bool:
    return isinstance(value, Mapping | bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_schema_map(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_schema, value.values()))


def _is_schema_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_schema, value))


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_types(value: Any) -> bool:
    names = [value] if isinstance(value, str) else value
    return isinstance(names, list) and bool(names) and all(name in TYPES for name in names)


_VALID: Final[Mapping[str, Callable[[Any], bool]]] = {
    "$ref": lambda value: isinstance(value, str),
    "type": _is_types,
    "enum": lambda value: isinstance(value, list) and bool(value),
    "const": lambda _: True,
    "allOf": _is_schema_list,
    "anyOf": _is_schema_list,
    "oneOf": _is_schema_list,
    "properties": _is_schema_map,
    "patternProperties": _is_schema_map,
    "required": _is_names,
    "additionalProperties": _is_schema,
    "minProperties": _is_count,
    "maxProperties": _is_count,
    "items": _is_schema,
    "prefixItems": _is_schema_list,
    "minItems": _is_count,
    "maxItems": _is_count,
    "minLength": _is_count,
    "maxLength": _is_count,
    "pattern": lambda value: isinstance(value, str),
    "format": lambda value: isinstance(value, str),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _is_number),
    "multipleOf": lambda value: _is_number(value) and value > 0,
}
"""The keywords that a guide follows, with what their values must be."""

_EMPTY: Final[Mapping[str, Callable[[Any], bool]]] = {
    "not": lambda value: value is False,
    "if": lambda _: False,
    "uniqueItems": lambda value: value is False,
    "contains": lambda _: False,
    "propertyNames": lambda value: value in (True, {}),
    "unevaluatedProperties": lambda value: value in (True, {}),
    "unevaluatedItems": lambda value: value in (True, {}),
    "dependentRequired": lambda value: value == {},
    "dependentSchemas": lambda value: value == {},
    "dependencies": lambda value: value == {},
    "$dynamicRef": lambda _: False,
    "$recursiveRef": lambda _: False,
}
"""The keywords that a guide cannot follow, with the values that demand nothing."""


def cleaned(node: Mapping[str, Any], path: str, losses: Losses) -> dict[str, Any]:
    """The keywords of one part that a guide follows, in the form of the present draft. Null stands for an absent
    keyword, as many libraries write it."""
    found: dict[str, Any] = {}
    node = _present_form(node)
    for keyword, value in node.items():
        if value is None:
            if keyword == "const":
                found[keyword] = None
            continue
        if keyword in _EMPTY:
            if not _demands_nothing(keyword, value, node):
                losses.add(path, keyword)
            continue
        is_valid = _VALID.get(keyword)
        if is_valid is None:
            continue
        if not is_valid(value):
            losses.add(path, keyword, "has a value that JSON Schema does not know")
            continue
        if keyword == "pattern":
            try:
                value = translated(value)
            except PatternError as error:
                losses.add(path, keyword, f"cannot be enforced: it {error}")
                found.setdefault("minLength", 0)  # it is a string all the same
                continue
        elif keyword == "format" and not _is_enforced(value, node):
            continue
        elif keyword == "multipleOf" and digits_of_multiple(value) > MAX_MULTIPLE:
            losses.add(path, keyword, f"has more digits than {MAX_MULTIPLE}")
            continue
        found[keyword] = value
    _drop_contradictions(found, path, losses)
    return found


def _is_enforced(name: str, node: Mapping[str, Any]) -> bool:
    """Times are written in shorter forms, too: where only those fit, the format is an annotation."""
    longest = node.get("maxLength", math.inf)
    return name in FORMATS and not (_is_number(longest) and longest < _SHORTEST_TIMES.get(name, 0))


def _demands_nothing(keyword: str, value: Any, node: Mapping[str, Any]) -> bool:
    if keyword == "if":
        return node.get("then") in (None, True, {}) and node.get("else") in (None, True, {})
    if keyword == "contains":
        return bool(node.get("minContains") == 0 and node.get("maxContains") is None)
    return _EMPTY[keyword](value)


def _present_form(node: Mapping[str, Any]) -> Mapping[str, Any]:
    """Older drafts' arrays of `items`, and bounds that are flags; `properties: []`, which is PHP's empty object."""
    changed = dict(node)
    if isinstance(node.get("items"), list):
        changed["prefixItems"] = changed.pop("items")
        if not changed["prefixItems"]:
            del changed["prefixItems"]
        changed["items"] = node.get("additionalItems", True)
    for bound, flag in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(node.get(flag), bool):
            del changed[flag]
            if node[flag] and bound in changed:
                changed[flag] = changed.pop(bound)
    if node.get("properties") == []:
        changed["properties"] = {}
    if node.get("unevaluatedProperties") is False and not ({"allOf", "anyOf", "oneOf", "$ref", "if"} & node.keys()):
        # With no other schema beside it, it means the same.
        changed.setdefault("additionalProperties", changed.pop("unevaluatedProperties"))
        changed.pop("unevaluatedProperties", None)
    _name_properties(changed)
    return changed


def _name_properties(node: dict[str, Any]) -> None:
    """`propertyNames`, where it can be said by other keywords: a pattern that all names match."""
    names = node.get("propertyNames")
    if not isinstance(names, Mapping) or "properties" in node or "patternProperties" in node:
        return
    values = node.get("additionalProperties", True)
    if isinstance(names.get("enum"), list) and all(isinstance(name, str) for name in names["enum"]):
        node["properties"] = dict.fromkeys(names["enum"], values)
    elif isinstance(names.get("pattern"), str) and names.keys() <= {"pattern", "type"}:
        node["patternProperties"] = {names["pattern"]: values}
    else:
        return
    node["additionalProperties"] = False
    del node["propertyNames"]


def _drop_contradictions(found: dict[str, Any], path: str, losses: Losses) -> None:
    for least, most in (
        ("minLength", "maxLength"),
        ("minItems", "maxItems"),
        ("minProperties", "maxProperties"),
        ("minimum", "maximum"),
        ("minimum", "exclusiveMaximum"),
        ("exclusiveMinimum", "maximum"),
        ("exclusiveMinimum", "exclusiveMaximum"),
    ):
        if least in found and most in found:
            strictly = least.startswith("excl") or most.startswith("excl")
            if found[least] > found[most] or (strictly and found[least] == found[most]):
                losses.add(path, least, f"leaves no value beside {most!r}")
                del found[least], found[most]
