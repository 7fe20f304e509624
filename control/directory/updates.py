"""Finds the columns that an update mask changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from google.protobuf import field_mask_pb2

from control.directory import account_limits
from control.directory.actor import Actor, failed_precondition
from kvloom.errors import invalid_argument

MAX_PATHS: Final = 64
"""A mask has at most so many paths; no message has so many fields and limits."""


def masked_values(
    mask: field_mask_pb2.FieldMask, message: Any, readers: Mapping[str, Callable[[Any], Any]], row: Mapping[Any, Any]
) -> dict[str, Any]:
    """The columns to be set. `readers` return the checked value of a field of the message, by its name, which is also
    that of its column. Raises KvloomError (INVALID_ARGUMENT) for fields that cannot be changed."""
    if not mask.paths:
        raise invalid_argument("The mask has to name the fields to be changed.", "update_mask")
    if len(mask.paths) > MAX_PATHS:
        raise invalid_argument(f"The mask has at most {MAX_PATHS} fields.", "update_mask")
    values: dict[str, Any] = {}
    for path in mask.paths:
        field, _, limit = path.partition(".")
        if field not in readers or (limit and field != "limits"):
            raise invalid_argument(f"{path[:64]!r} cannot be changed.", "update_mask")
        if not limit:
            values[field] = readers[field](message)
            continue
        try:
            values[field] = account_limits.with_limit(values.get(field, row[field]), message.limits, limit)
        except KeyError:
            raise invalid_argument(f"There is no limit {limit[:64]!r}.", "update_mask") from None
    return values


def known_tier(actor: Actor, name: str, before: str | None, tiers: Mapping[str, Any]) -> str | None:
    """The column of a tier, which only the operator changes. Raises KvloomError (PERMISSION_DENIED), and
    FAILED_PRECONDITION if there is no such tier."""
    if (name or None) == before:
        return before
    actor.require_operator("the tier of limits of an account")
    if name and name not in tiers:
        there_are = ", ".join(sorted(tiers)) or "none"
        raise failed_precondition(f"There is no tier of limits {name[:64]!r}. Tiers: {there_are}.")
    return name or None
