"""The objectives of a request on the wire: their checks, and how they travel on to another router
(docs/how-to/deadlines.md)."""

from __future__ import annotations

import math
from typing import Final

from kvloom.errors import invalid_argument
from kvloom.v1.router_service_pb2 import Objectives

MAX_MILLISECONDS: Final = 86_400_000.0
"""One day."""
OBJECTIVE_NAMES: Final = ("deadline_ms", "ttft_ms", "tpot_ms")


def check_objectives(objectives: Objectives, at: str = "objectives.") -> None:
    """`at` precedes the fields' names in errors. Raises KvloomError (INVALID_ARGUMENT) that names the field."""
    for name in OBJECTIVE_NAMES:
        if objectives.HasField(name):
            check_milliseconds(getattr(objectives, name), f"{at}{name}")
    if not 0 <= objectives.elapsed_ms <= MAX_MILLISECONDS:
        raise invalid_argument(f"{at}elapsed_ms must be from 0 to {MAX_MILLISECONDS:.0f}.", f"{at}elapsed_ms")


def check_milliseconds(value: float, field: str) -> None:
    """Raises KvloomError (INVALID_ARGUMENT) that names the field."""
    if not (math.isfinite(value) and 0 < value <= MAX_MILLISECONDS):
        raise invalid_argument(
            f"{field} must be a number of milliseconds above 0 and at most {MAX_MILLISECONDS:.0f}.", field
        )


def delay_objectives(objectives: Objectives, seconds: float, *, is_admitted: bool = False) -> None:
    """Let them be those of a request that continues so much later: they count from when it first arrived."""
    objectives.elapsed_ms = min(objectives.elapsed_ms + max(seconds, 0.0) * 1e3, MAX_MILLISECONDS)
    objectives.admitted = objectives.admitted or is_admitted
