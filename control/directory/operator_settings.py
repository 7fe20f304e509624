"""Settings of the operator of the fabric on a project, a key or a user, which administrators of the organisation can
therefore only make stricter.

It is in the column `operator_set`: by the names of columns, the values that restrict something. Limits are in force
beside those of the administrators, and the stricter one holds (account_limits.py). A restriction of another kind is
what the column of that name may be set to at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from control.directory.actor import Actor
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.tenancy.table import allows_model

COLUMN: Final = "operator_set"
NOTHING: Final[Mapping[str, Any]] = {COLUMN: {}}
"""A row that the operator has set nothing of."""
REVOKED: Final = "revoked"
"""In `operator_set` of an identity: the operator has ended it."""
_LISTS: Final = ("models", "priority_classes", "residency", "scopes")
"""Columns that say what is allowed. But for the last one, an empty one allows everything."""


def settled(
    actor: Actor, before: Mapping[Any, Any], changed: Mapping[str, Any], paths: Iterable[str], field: str
) -> dict[str, Any]:
    """The columns to be set, given those that an actor changes and the paths (of an update mask) by which they were
    named. `before`: the row; NOTHING: there is none yet. Raises KvloomError
    (PERMISSION_DENIED) that names a field, in `field`, by which an administrator would lift what the operator has
    set."""
    if actor.organisation is None:
        return {**changed, COLUMN: _by_operator(before[COLUMN], changed, paths)}
    for name, most in before[COLUMN].items():
        if name in changed and not _is_within(name, changed[name], most):
            message = f"The operator of the fabric has set {name!r}, which can only be made stricter."
            raise KvloomError(ErrorReason.ERROR_REASON_PERMISSION_DENIED, message, field=f"{field}.{name}")
    return dict(changed)


def limits_of(operator_set: Mapping[str, Any]) -> dict[str, Any]:
    """The stored limits that are the operator's."""
    found: dict[str, Any] = operator_set.get("limits", {})
    return found


def with_limits_of(row: Mapping[Any, Any], other: Mapping[Any, Any]) -> dict[str, Any]:
    """The column of `other` with the operator's limits of a row, whose account it shares."""
    own = {name: value for name, value in other[COLUMN].items() if name != "limits"}
    limits = limits_of(row[COLUMN])
    return {COLUMN: {**own, "limits": limits} if limits else own}


def _by_operator(known: Mapping[str, Any], changed: Mapping[str, Any], paths: Iterable[str]) -> dict[str, Any]:
    found = dict(known)
    for path in paths:
        name, _, limit = path.partition(".")
        if limit:
            value = changed["limits"].get(limit)
            others = {one: other for one, other in limits_of(found).items() if one != limit}
            found["limits"] = others if value is None else {**others, limit: value}
        elif name in changed:
            found[name] = changed[name]
    return {name: value for name, value in found.items() if name in _RESTRICTIONS and value}


_RESTRICTIONS: Final = ("limits", "disabled", "expires_at", REVOKED, "guardrails", *_LISTS)


def _is_within(name: str, value: Any, most: Any) -> bool:
    if name == "disabled":
        return bool(value)
    if name == "expires_at":
        return value is not None and value <= most
    if name == "guardrails":
        return set(value) >= set(most)  # each restricts
    if name == "models":
        return bool(value) and all(_includes(most, pattern) for pattern in value)
    if name in _LISTS:
        return bool(value) and set(value) <= set(most)
    return True


def _includes(patterns: Sequence[str], pattern: str) -> bool:
    """Returns true if all models of a pattern are among those of the others."""
    if pattern.endswith("*"):
        return any(one.endswith("*") and pattern.startswith(one[:-1]) for one in patterns)
    return allows_model(patterns, pattern)
