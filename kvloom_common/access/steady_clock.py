"""Tells for how long the machine's clock has run evenly, so that a jump of it does no lasting damage."""

from __future__ import annotations

from typing import Final

MAX_DRIFT_SECONDS: Final = 30.0
"""Between two looks. What is less is a clock that is adjusted; what is more is one that was set."""


class SteadyClock:
    """All times are seconds: `wall` since 1970, `monotonic` those of a clock that nothing sets."""

    def __init__(self, wall: float, monotonic: float) -> None:
        self._offset = wall - monotonic
        self._since = monotonic

    def steady_seconds(self, wall: float, monotonic: float) -> float:
        """How long ago the clock was last set, or looked at first."""
        offset = wall - monotonic
        if abs(offset - self._offset) > MAX_DRIFT_SECONDS:
            self._since = monotonic
        self._offset = offset
        return monotonic - self._since
