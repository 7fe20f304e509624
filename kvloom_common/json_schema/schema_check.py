"""Decides if a JSON value conforms to a JSON Schema, as far as a small part of the standard says.

Keywords that are not here (`pattern`, `format`, `dependentSchemas`, `unevaluated...`, references to other documents)
are not checked, so an answer is never found wrong because of them. The work is bounded, which that of no library is:
a client's schema of forty levels of `allOf` may demand 2^40 checks (jsonschema-rs 0.61 makes them all).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeGuard

MAX_CHECKS: Final = 20_000
"""Pairs of a value and a schema that are looked at: some 20 ms. What is left after them counts as conforming."""
MAX_LEVELS: Final = 64

_TYPES: Final[Mapping[str, Callable[[Any], bool]]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": lambda value: _is_number(value),
    "integer": lambda value: _is_number(value) and value == int(value),
}


def conforms(value: Any, schema: Any) -> bool:
    """`value` and `schema` are what a JSON parser returns. A malformed schema allows everything."""
    return _Check(schema).holds(value, schema, MAX_LEVELS)


class _Check:
    """One check, with what is left of its bound."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._num_left = MAX_CHECKS

    def holds(self, value: Any, schema: Any, levels_left: int) -> bool:
        self._num_left -= 1
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping) or self._num_left < 0 or not levels_left:
            return True
        return (
            _has_type(value, schema.get("type"))
            and ("const" not in schema or _equal(value, schema["const"]))
            and (not isinstance(schema.get("enum"), list) or any(_equal(value, one) for one in schema["enum"]))
            and self._combinations_hold(value, schema, levels_left - 1)
            and self._branches_hold(value, schema, levels_left - 1)
            and self._parts_hold(value, schema, levels_left - 1)
            and _limits_hold(value, schema)
        )

    def _combinations_hold(self, value: Any, schema: Mapping[str, Any], levels_left: int) -> bool:
        def found(key: str) -> list[bool] | None:
            given = schema.get(key)
            return [self.holds(value, one, levels_left) for one in given] if isinstance(given, list) else None

        all_of, any_of, one_of = found("allOf"), found("anyOf"), found("oneOf")
        if self._num_left < 0:
            return True
        return (
            (all_of is None or all(all_of))
            and (any_of is None or any(any_of))
            and (one_of is None or one_of.count(True) == 1)
            and ("not" not in schema or not self._is_excluded(value, schema["not"], levels_left))
            and ("$ref" not in schema or self.holds(value, self._referred(schema["$ref"]), levels_left))
        )

    def _is_excluded(self, value: Any, schema: Any, levels_left: int) -> bool:
        """Beyond the bounds everything conforms, to `not` as well."""
        return levels_left > 0 and self.holds(value, schema, levels_left) and self._num_left >= 0

    def _parts_hold(self, value: Any, schema: Mapping[str, Any], levels_left: int) -> bool:
        if isinstance(value, dict):
            return self._properties_hold(value, schema, levels_left)
        if isinstance(value, list):
            if not self._list_holds(value, schema, levels_left):
                return False
            first = schema.get("prefixItems")
            first = first if isinstance(first, list) else []
            rest = schema.get("items", True)
            return all(
                self.holds(item, first[number] if number < len(first) else rest, levels_left)
                for number, item in enumerate(value)
            )
        return True

    def _list_holds(self, value: list[Any], schema: Mapping[str, Any], levels_left: int) -> bool:
        """Checks what is said of all items together."""
        if schema.get("uniqueItems") is True:
            self._num_left -= len(value)
            texts = [json.dumps(item, sort_keys=True) for item in value]
            if len(set(texts)) < len(texts) and self._num_left >= 0:
                return False
        if "contains" not in schema:
            return True
        num_found = sum(self.holds(item, schema["contains"], levels_left) for item in value)
        least, most = _number(schema, "minContains", 1), _number(schema, "maxContains", len(value))
        return self._num_left < 0 or least <= num_found <= most

    def _branches_hold(self, value: Any, schema: Mapping[str, Any], levels_left: int) -> bool:
        if "if" not in schema or not levels_left:
            return True
        branch = "then" if self.holds(value, schema["if"], levels_left) else "else"
        return self._num_left < 0 or self.holds(value, schema.get(branch, True), levels_left)

    def _properties_hold(self, value: Mapping[str, Any], schema: Mapping[str, Any], levels_left: int) -> bool:
        known = schema.get("properties")
        known = known if isinstance(known, Mapping) else {}
        required = schema.get("required")
        if isinstance(required, list) and not all(name in value for name in required):
            return False
        needed = schema.get("dependentRequired")
        if isinstance(needed, Mapping):
            for name, others in needed.items():
                if name in value and isinstance(others, list) and not all(other in value for other in others):
                    return False
        names = schema.get("propertyNames", True)
        if not all(self.holds(name, names, levels_left) for name in value):
            return False
        # Names that match a pattern are none of the additional ones; patterns are not checked.
        others = True if "patternProperties" in schema else schema.get("additionalProperties", True)
        return all(self.holds(part, known.get(name, others), levels_left) for name, part in value.items())

    def _referred(self, reference: Any) -> Any:
        """The part of the schema that "#/$defs/..." names. An unknown one allows everything."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return True
        found = self._root
        for name in reference[1:].split("/")[1:]:
            key = name.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, Mapping) or key not in found:
                return True
            found = found[key]
        return found


def _has_type(value: Any, wanted: Any) -> bool:
    names = [wanted] if isinstance(wanted, str) else wanted
    if not isinstance(names, list) or not all(isinstance(name, str) and name in _TYPES for name in names):
        return True
    return any(_TYPES[name](value) for name in names)


def _limits_hold(value: Any, schema: Mapping[str, Any]) -> bool:
    if _is_number(value):
        return (
            value >= _number(schema, "minimum", value)
            and value <= _number(schema, "maximum", value)
            and ("exclusiveMinimum" not in schema or value > _number(schema, "exclusiveMinimum", value - 1))
            and ("exclusiveMaximum" not in schema or value < _number(schema, "exclusiveMaximum", value + 1))
        )
    sizes = {str: ("minLength", "maxLength"), list: ("minItems", "maxItems"), dict: ("minProperties", "maxProperties")}
    least, most = sizes.get(type(value), ("", ""))
    if not least:
        return True
    return _number(schema, least, 0) <= len(value) <= _number(schema, most, len(value))


def _number(schema: Mapping[str, Any], key: str, otherwise: float) -> float:
    given = schema.get(key)
    return given if _is_number(given) else otherwise


def _is_number(value: Any) -> TypeGuard[int | float]:
    """JSON knows no infinity, but 1e999 is read as one."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) != float("inf")


def _equal(left: Any, right: Any) -> bool:
    """Compares as JSON does: true is not 1."""
    return left == right and isinstance(left, bool) == isinstance(right, bool)
