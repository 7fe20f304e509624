"""Verdict is what a limit says to a request."""

from __future__ import annotations

import math
from typing import Final, NamedTuple


class LimitVerdict(NamedTuple):
    is_ready: bool
    is_wanted: bool = False
    """A lease has to be asked for before it is known."""
    retry_after_seconds: float = 0.0
    """If it is neither: when there will be enough."""


READY: Final = LimitVerdict(True)
WANTED: Final = LimitVerdict(False, True)


def refused(retry_after_seconds: float) -> LimitVerdict:
    """Rounded up to a millisecond, so that a retry at that time is not too early."""
    return LimitVerdict(False, False, math.ceil(retry_after_seconds * 1e3) / 1e3 + 0.001)
