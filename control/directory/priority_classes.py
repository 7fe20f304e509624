"""The priority classes that organisations, projects and keys may name, and the one of their requests that name none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from control.directory import names
from kvloom.v1 import directory_service_pb2 as pb

NONE_GIVEN: Final[Mapping[str, Any]] = {"priority_classes": [], "default_priority_class": ""}
"""The columns of what may name all of them."""
READERS: Final[Mapping[str, Any]] = {
    "priority_classes": lambda one: list(dict.fromkeys(one.priority_classes)),
    "default_priority_class": lambda one: one.default_priority_class,
}
"""The columns of the fields that an update may name, to be checked afterwards: one must fit the other."""


def stored(given: pb.Organisation | pb.Project | pb.ApiKey, field: str) -> dict[str, Any]:
    """The columns. Raises KvloomError (INVALID_ARGUMENT)."""
    columns = {name: read(given) for name, read in READERS.items()}
    check(columns, field)
    return columns


def check(row: Mapping[Any, Any], field: str) -> None:
    """Raises KvloomError (INVALID_ARGUMENT)."""
    allowed = names.priority_classes(row["priority_classes"], f"{field}.priority_classes")
    names.default_priority_class(row["default_priority_class"], allowed, f"{field}.default_priority_class")
