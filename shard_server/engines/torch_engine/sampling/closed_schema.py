"""Objects have the properties that their schema names, and no others, unless it speaks of others.

JSON Schema allows any other properties where `additionalProperties` is absent, as it is in the schemas that most
clients make from their users' types. Small models then add properties until their tokens are used up. What is generated
under the narrower schema conforms to the given one, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_OPEN: Final = frozenset(
    (
        "additionalProperties",
        "patternProperties",
        "propertyNames",
        "unevaluatedProperties",
        "minProperties",
        "dependentRequired",
        "dependentSchemas",
    )
)
"""A schema with one of these speaks of properties that it does not name."""
_SUBSCHEMAS: Final = frozenset(("items", "contains"))
_LISTS: Final = frozenset(("anyOf", "prefixItems"))
_MAPS: Final = frozenset(("properties", "$defs", "definitions"))


def closed_schema(schema: Any) -> Any:
    """The schema with closed objects. One that combines schemas for one object is returned as it is: each of them would
    exclude the others' properties."""
    return schema if _combines(schema) else _closed(schema)


def _combines(node: Any) -> bool:
    if not isinstance(node, Mapping):
        return isinstance(node, list) and any(map(_combines, node))
    if "allOf" in node or "oneOf" in node or ("properties" in node and ("anyOf" in node or "$ref" in node)):
        return True
    return any(map(_combines, node.values()))


def _closed(node: Any) -> Any:
    if not isinstance(node, Mapping):
        return node
    closed = {key: _closed_child(key, child) for key, child in node.items()}
    properties, required = node.get("properties"), node.get("required", [])
    if (
        isinstance(properties, Mapping)
        and isinstance(required, list)
        and _OPEN.isdisjoint(node)
        and all(isinstance(name, str) and name in properties for name in required)
    ):
        closed["additionalProperties"] = False
    return closed


def _closed_child(key: str, child: Any) -> Any:
    if key in _SUBSCHEMAS:
        return _closed(child)
    if key in _LISTS and isinstance(child, list):
        return [_closed(each) for each in child]
    if key in _MAPS and isinstance(child, Mapping):
        return {name: _closed(each) for name, each in child.items()}
    return child
