"""Bounds for what a model could write without end.

JSON Schema bounds neither the digits of numbers nor the fractions of times, and where it says nothing of a value, the
value may be nested without end. A model that falls into a loop there writes until its tokens are used up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvloom.guide import digits_of_multiple

MAX_INTEGER: Final = 10**18 - 1
MAX_NUMBER: Final = 10**15
SMALLEST_STEP: Final = 1e-9
"""Numbers have at most 15 digits before the point and nine behind it, and no exponent."""
MAX_ANY_DEPTH: Final = 12
"""How deep values are nested of which the schema says nothing."""
MAX_KEY_CHARS: Final = 128
"""The length of keys that the schema does not name."""
_MAX_BOUNDED_MULTIPLE: Final = 100
"""A compiler makes as many states as the multiple, times the digits."""

_ANY: Final = "any"
_TIME: Final = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,9})?(?:Z|[+\-](?:[01]\d|2[0-3]):[0-5]\d)"
_DATE: Final = (
    r"\d{4}\-(?:(?:0[13578]|1[02])\-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)\-(?:0[1-9]|[12]\d|30)|02\-(?:0[1-9]|[12]\d))"
)
_N: Final = r"\d{1,9}"
_DAYS: Final = rf"(?:{_N}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)"
_HOURS: Final = rf"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
_FORMATS: Final[Mapping[str, str]] = {
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "duration": f"^P(?:{_N}W|{_DAYS}(?:{_HOURS})?|{_HOURS})$",
}
"""Formats with digits in any number, as patterns."""


def bounded(schema: Mapping[str, Any]) -> dict[str, Any]:
    """`schema` has been simplified. What is written under the result conforms to the given schema, too."""
    whole = _Bounds()
    found = whole.part({keyword: value for keyword, value in schema.items() if keyword != "$defs"})
    definitions = {name: whole.part(each) for name, each in schema.get("$defs", {}).items()}
    if whole.has_any:
        definitions |= _any_definitions()
    if found is False:
        return {"not": {}}
    return {**found, "$defs": definitions} if definitions else found


class _Bounds:
    def __init__(self) -> None:
        self.has_any = False

    def part(self, node: Any) -> Any:
        if node is True or node == {}:
            return self._any()
        if not isinstance(node, Mapping):
            return node
        found = {keyword: self._child(keyword, value) for keyword, value in node.items()}
        match node.get("type"):
            case "object" if "additionalProperties" not in node:
                found["additionalProperties"] = self._any()
            case "array" if "items" not in node and node.get("maxItems") != len(node.get("prefixItems", ())):
                found["items"] = self._any()
            case "integer" | "number":
                _bound_number(found)
            case "string" if "pattern" not in node and node.get("format") in _FORMATS:
                found["pattern"] = _FORMATS[found.pop("format")]
        return found

    def _any(self) -> dict[str, Any]:
        self.has_any = True
        return {"$ref": f"#/$defs/{_ANY}0"}

    def _child(self, keyword: str, value: Any) -> Any:
        if keyword in ("properties", "patternProperties"):
            return {name: self.part(each) for name, each in value.items()}
        if keyword in ("anyOf", "prefixItems"):
            return [self.part(each) for each in value]
        if keyword in ("items", "additionalProperties"):
            return self.part(value)
        return value  # the parts of allOf are merged by the compiler, which would multiply bounds


def _bound_number(node: dict[str, Any]) -> None:
    multiple = node.get("multipleOf")
    if multiple is not None and digits_of_multiple(multiple) > _MAX_BOUNDED_MULTIPLE:
        return
    limit = MAX_INTEGER if node["type"] == "integer" else MAX_NUMBER
    lows = [node[keyword] for keyword in ("minimum", "exclusiveMinimum") if keyword in node]
    highs = [node[keyword] for keyword in ("maximum", "exclusiveMaximum") if keyword in node]
    if not lows and all(high > -limit for high in highs):
        node["minimum"] = -limit
    if not highs and all(low < limit for low in lows):
        node["maximum"] = limit
    # Bounds that are finer than the step, or beyond it, may leave no number that has so few digits.
    is_usual = all(abs(bound) <= MAX_NUMBER and round(bound, 6) == bound for bound in (*lows, *highs))
    if node["type"] == "number" and multiple is None and is_usual:
        node["multipleOf"] = SMALLEST_STEP


def _any_definitions() -> dict[str, Any]:
    """A value of any kind, and those that stand in it, level by level."""
    number: dict[str, Any] = {"type": "number"}
    _bound_number(number)
    scalars = [{"type": "string"}, number, {"type": "boolean"}, {"type": "null"}]
    found: dict[str, Any] = {}
    for level in range(MAX_ANY_DEPTH):
        inner = {"$ref": f"#/$defs/{_ANY}{level + 1}"}
        nested = [{"type": "object", "additionalProperties": inner}, {"type": "array", "items": inner}]
        found[f"{_ANY}{level}"] = {"anyOf": [*nested, *scalars]}
    found[f"{_ANY}{MAX_ANY_DEPTH}"] = {"anyOf": scalars}
    return found
