"""The deadline and the objectives of a request (docs/deadlines.md): what its headers say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from edge_http.wire.headers import DEADLINE, SLO_TPOT, SLO_TPOT_LLM_D, SLO_TTFT, SLO_TTFT_LLM_D
from kvloom.errors import invalid_argument
from kvloom.objectives import MAX_MILLISECONDS, check_milliseconds
from kvloom.v1.router_service_pb2 import Objectives

OBJECTIVE_HEADERS: Final = (DEADLINE, SLO_TTFT, SLO_TPOT, SLO_TTFT_LLM_D, SLO_TPOT_LLM_D)
MAX_CHARS: Final = 32
"""No number of milliseconds needs more."""


def has_objectives(headers: Mapping[str, str]) -> bool:
    return any(name in headers for name in OBJECTIVE_HEADERS)


def objectives_of(headers: Mapping[str, str], elapsed_seconds: float) -> Objectives:
    """`elapsed_seconds`: how long ago the request arrived. Raises KvloomError (INVALID_ARGUMENT) that names the
    header."""
    return Objectives(
        deadline_ms=_milliseconds(headers, DEADLINE),
        ttft_ms=_agreed(headers, SLO_TTFT, SLO_TTFT_LLM_D),
        tpot_ms=_agreed(headers, SLO_TPOT, SLO_TPOT_LLM_D),
        elapsed_ms=min(max(elapsed_seconds, 0.0) * 1e3, MAX_MILLISECONDS),
    )


def _agreed(headers: Mapping[str, str], name: str, alias: str) -> float | None:
    value, other = _milliseconds(headers, name), _milliseconds(headers, alias)
    if value is not None and other is not None and value != other:
        raise invalid_argument(f"{alias} contradicts {name}: give one of them.", alias)
    return other if value is None else value


def _milliseconds(headers: Mapping[str, str], name: str) -> float | None:
    given = headers.get(name)
    if given is None:
        return None
    try:
        # float() would also take "1_000" and "٣".
        value = float(given) if given.isascii() and "_" not in given and len(given) <= MAX_CHARS else float("nan")
    except ValueError:
        value = float("nan")
    check_milliseconds(value, name)
    return value
