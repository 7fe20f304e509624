"""Filters of searches: conditions on the attributes of files, joined by and and or."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

from kvloom.errors import KvloomError, invalid_argument

MAX_DEPTH: Final = 8
MAX_CONDITIONS: Final = 128
_ORDERED: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "gt": operator.gt,
    "gte": operator.ge,
    "lt": operator.lt,
    "lte": operator.le,
}
_LISTED: Final = ("in", "nin")
_JOINED: Final = ("and", "or")

Attributes = Mapping[str, Any]
Filter = Mapping[str, Any]


def check(given: Filter, at: str = "filters") -> None:
    """Raises KvloomError (INVALID_ARGUMENT) that names the part at fault."""
    if _check(given, at, 1) > MAX_CONDITIONS:
        raise invalid_argument(f"{at} has more than {MAX_CONDITIONS} conditions.", at)


def _check(given: Filter, at: str, depth: int) -> int:
    """Returns the number of conditions."""
    if depth > MAX_DEPTH:
        raise invalid_argument(f"{at}: filters are nested in at most {MAX_DEPTH} levels.", at)
    if given["type"] in _JOINED:
        parts = given.get("filters")
        if not parts:
            raise invalid_argument(f"{at}.filters is missing.", f"{at}.filters")
        return sum(_check(part, f"{at}.filters[{number}]", depth + 1) for number, part in enumerate(parts))
    for name in ("key", "value"):
        if given.get(name) is None:
            raise invalid_argument(f"{at}.{name} is missing.", f"{at}.{name}")
    value = given["value"]
    if isinstance(value, list) != (given["type"] in _LISTED):
        raise _bad_value(at, "a list" if given["type"] in _LISTED else "no list", given["type"])
    if given["type"] in _ORDERED and isinstance(value, bool):
        raise _bad_value(at, "a number or a text", given["type"])
    return 1


def _bad_value(at: str, wanted: str, kind: str) -> KvloomError:
    return invalid_argument(f"{at}.value must be {wanted} for {kind}.", f"{at}.value")


def passes(given: Filter, attributes: Attributes) -> bool:
    """Returns True if a file with these attributes may be found. `given` was checked. A missing attribute equals
    nothing, and is neither greater nor less than anything."""
    kind = given["type"]
    if kind in _JOINED:
        return (all if kind == "and" else any)(passes(part, attributes) for part in given["filters"])
    there: Any = attributes.get(given["key"])
    value = given["value"]
    if kind in _LISTED:
        return any(_equal(there, one) for one in value) == (kind == "in")
    if kind in _ORDERED:
        return _comparable(there, value) and _ORDERED[kind](there, value)
    return _equal(there, value) == (kind == "eq")


def _equal(there: Any, value: Any) -> bool:
    """True is not 1, and "1" neither."""
    return isinstance(there, bool) == isinstance(value, bool) and there == value


def _comparable(there: Any, value: Any) -> bool:
    if isinstance(there, bool):
        return False
    return isinstance(there, str) == isinstance(value, str) and isinstance(there, str | int | float)
