"""One schema from several that hold for the same value, where its keywords can say it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvloom_common.json_schema.keywords import TYPES

_GREATEST: Final = frozenset(("minLength", "minItems", "minProperties", "minimum", "exclusiveMinimum"))
_LEAST: Final = frozenset(("maxLength", "maxItems", "maxProperties", "maximum", "exclusiveMaximum"))


class Unmergeable(Exception):  # noqa: N818  (not an error: they stay apart)
    """The schemas have keywords whose meaning depends on what stands beside them."""


class Contradiction(Exception):  # noqa: N818  (a verdict about schemas)
    """No value conforms to all of the schemas."""

    def __init__(self, keyword: str) -> None:
        super().__init__(keyword)
        self.keyword = keyword


def merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`parts` have been cleaned, and have none of the keywords that combine schemas. Raises Unmergeable and
    Contradiction."""
    whole: dict[str, Any] = dict(parts[0]) if parts else {}
    for part in parts[1:]:
        _check_objects(whole, part)
        for keyword, value in part.items():
            whole[keyword] = _both(keyword, whole[keyword], value) if keyword in whole else value
    return whole


def _check_objects(left: Mapping[str, Any], right: Mapping[str, Any]) -> None:
    """`additionalProperties` and `items` are about what the keywords beside them do not name."""
    for one, other in ((left, right), (right, left)):
        if one.get("additionalProperties", True) not in (True, {}):
            named = set(one.get("properties", ()))
            if "patternProperties" in other or not named.issuperset(other.get("properties", ())):
                raise Unmergeable
        if "prefixItems" in one and ("items" in other or "prefixItems" in other):
            raise Unmergeable


def _both(keyword: str, left: Any, right: Any) -> Any:
    if left == right and isinstance(left, bool) == isinstance(right, bool):
        return left
    if keyword in _GREATEST:
        return max(left, right)
    if keyword in _LEAST:
        return min(left, right)
    if keyword == "required":
        return list(dict.fromkeys([*left, *right]))
    if keyword in ("properties", "patternProperties"):
        return {
            name: _all_of(left[name], right[name])
            if name in left and name in right
            else left.get(name, right.get(name))
            for name in [*left, *(name for name in right if name not in left)]
        }
    if keyword in ("items", "additionalProperties"):
        return _all_of(left, right)
    if keyword == "type":
        return _common_types(left, right)
    if keyword == "enum":
        return _common_values(left, right)
    if keyword == "multipleOf" and isinstance(left, int) and isinstance(right, int):
        return math.lcm(left, right)
    raise Unmergeable


def _all_of(left: Any, right: Any) -> Any:
    return left if right in (True, {}) else right if left in (True, {}) else {"allOf": [left, right]}


def type_names(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def _common_types(left: str | list[str], right: str | list[str]) -> str | list[str]:
    wide, other = set(type_names(left)), set(type_names(right))
    common = wide & other
    if ("number" in wide and "integer" in other) or ("integer" in wide and "number" in other):
        common.add("integer")
    if not common:
        raise Contradiction("type")
    names = [name for name in TYPES if name in common and not (name == "integer" and "number" in common)]
    return names[0] if len(names) == 1 else names


def _common_values(left: list[Any], right: list[Any]) -> list[Any]:
    allowed = {json.dumps(each, sort_keys=True) for each in right}
    common = [one for one in left if json.dumps(one, sort_keys=True) in allowed]
    if not common:
        raise Contradiction("enum")
    return common
