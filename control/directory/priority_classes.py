"""The priority classes that organisations, projects and keys may name, and the one of their requests that name none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from control.directory import names

NONE_GIVEN: Final[Mapping[str, Any]] = {"priority_classes": [], "default_priority_class": ""}
"""The columns of what may name all of them."""
ALL: Final = "*"
"""In place of names: all of them."""


def readers(field: str, before: Mapping[Any, Any]) -> Mapping[str, Any]:
    """The columns of the fields that an update may name, to be checked afterwards: one must fit the other. `before`:
    the row. Raise KvloomError (INVALID_ARGUMENT)."""
    return {
        "priority_classes": lambda one: _allowed(one.priority_classes, before, f"{field}.priority_classes"),
        "default_priority_class": lambda one: one.default_priority_class,
    }


def _allowed(given: Sequence[str], before: Mapping[Any, Any], field: str) -> list[str]:
    if list(given) == [ALL]:
        return []
    names.require_some(given, before["priority_classes"], field)
    return list(dict.fromkeys(given))


def check(row: Mapping[Any, Any], field: str) -> None:
    """Raises KvloomError (INVALID_ARGUMENT)."""
    allowed = names.priority_classes(row["priority_classes"], f"{field}.priority_classes")
    names.default_priority_class(row["default_priority_class"], allowed, f"{field}.default_priority_class")
