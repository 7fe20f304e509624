"""Limits as they are stored, and those in force: the tier's, the operator's and an administrator's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from control.database.schema import MAX_INTEGER
from control.directory import names, operator_settings
from kvloom.v1 import control_service_pb2 as control_pb
from kvloom_common.tenancy.limits import Limits, limits_from_proto, limits_to_proto

MAX_PERCENT: Final = 10_000
KV_SHARE: Final = "kv_share_percent"
_WEIGHTS: Final = ("cached_token_percent", "reasoning_token_percent")
"""The larger, the stricter."""
_QUANTITIES: Final = tuple(name for name in Limits.__struct_fields__ if name not in (KV_SHARE, "shadow", *_WEIGHTS))
"""The smaller, the stricter; 0: no limit."""
_DEFAULTS: Final = {field: getattr(Limits(), field) for field in Limits.__struct_fields__}


def stored(limits: control_pb.Limits, field: str = "limits") -> dict[str, Any]:
    """Limits as JSON: those that differ from the defaults. Raises KvloomError (INVALID_ARGUMENT)."""
    found: dict[str, Any] = msgspec.to_builtins(limits_from_proto(limits))
    for name, value in found.items():
        names.integer(value, MAX_PERCENT if name.endswith("_percent") else MAX_INTEGER, f"{field}.{name}")
    return found


def shown(stored_limits: Mapping[str, Any]) -> control_pb.Limits:
    return limits_to_proto(msgspec.convert(stored_limits, Limits))


def effective(
    tier: str | None,
    own: Mapping[str, Any],
    tiers: Mapping[str, Mapping[str, Any]],
    operator_set: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The limits in force, as stored: the tier's, with the operator's where they differ from the defaults, and the
    stricter ones of these and the account's own. Without `operator_set`, own ones are the operator's."""
    of_tier = tiers.get(tier or "", {})
    if operator_set is None:
        return {**of_tier, **own}
    return stricter({**of_tier, **operator_settings.limits_of(operator_set)}, own)


def stricter(operators: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Limits that allow no more than the operator's and an administrator's, both as stored. Limits in shadow mode
    refuse nothing, so that they give way to others. Of KV blocks the operator's share holds, if there is one."""
    found = _stricter(operators, own)
    share = operators.get(KV_SHARE) or own.get(KV_SHARE)
    return {**found, KV_SHARE: share} if share else found


def _stricter(operators: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    if not _limits_something(operators):
        return _without_share(own)
    if _limits_something(own) and operators.get("shadow", False) != own.get("shadow", False):
        return _without_share(own if operators.get("shadow") else operators)
    found: dict[str, Any] = {name: operators[name] for name in ("shadow",) if name in operators}
    for name in _QUANTITIES:
        if given := [one for one in (operators.get(name), own.get(name)) if one]:
            found[name] = min(given)
    for name in _WEIGHTS:
        weight = operators.get(name, _DEFAULTS[name])
        if (weight := max(weight, own.get(name, weight))) != _DEFAULTS[name]:
            found[name] = weight
    return found


def _limits_something(limits: Mapping[str, Any]) -> bool:
    return any(limits.get(name) for name in _QUANTITIES)


def _without_share(limits: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in limits.items() if name != KV_SHARE}


def with_limit(stored_limits: Mapping[str, Any], limits: control_pb.Limits, name: str) -> dict[str, Any]:
    """Stored limits with one of other limits. Raises KvloomError (INVALID_ARGUMENT) and KeyError."""
    default = _DEFAULTS[name]
    found = {**stored_limits, name: stored(limits).get(name, default)}
    return {field: value for field, value in found.items() if value != _DEFAULTS[field]}
