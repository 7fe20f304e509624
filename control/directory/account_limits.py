"""Limits as they are stored, and the tier's limits under an account's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from control.database.schema import MAX_INTEGER
from control.directory import names
from kvloom.v1 import control_service_pb2 as control_pb
from kvloom_common.tenancy.limits import Limits, limits_from_proto, limits_to_proto

MAX_PERCENT: Final = 10_000
_DEFAULTS: Final = {field: getattr(Limits(), field) for field in Limits.__struct_fields__}


def stored(limits: control_pb.Limits, field: str = "limits") -> dict[str, Any]:
    """Limits as JSON: those that differ from the defaults. Raises KvloomError (INVALID_ARGUMENT)."""
    found: dict[str, Any] = msgspec.to_builtins(limits_from_proto(limits))
    for name, value in found.items():
        names.integer(value, MAX_PERCENT if name.endswith("_percent") else MAX_INTEGER, f"{field}.{name}")
    return found


def shown(stored_limits: Mapping[str, Any]) -> control_pb.Limits:
    return limits_to_proto(msgspec.convert(stored_limits, Limits))


def effective(tier: str | None, own: Mapping[str, Any], tiers: Mapping[str, Mapping[str, Any]]) -> control_pb.Limits:
    """The tier's limits, with the account's own where they differ from the defaults."""
    return shown({**tiers.get(tier or "", {}), **own})


def with_limit(stored_limits: Mapping[str, Any], limits: control_pb.Limits, name: str) -> dict[str, Any]:
    """Stored limits with one of other limits. Raises KvloomError (INVALID_ARGUMENT) and KeyError."""
    default = _DEFAULTS[name]
    found = {**stored_limits, name: stored(limits).get(name, default)}
    return {field: value for field, value in found.items() if value != _DEFAULTS[field]}
