"""Exponential backoff: a pure policy, without a clock and without randomness of its own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

_MAX_EXPONENT = 64
"""Beyond that a delay has long reached its maximum; without a bound, weeks of failures would overflow a float."""


@dataclasses.dataclass(slots=True)
class Backoff:
    """Delays that grow by `factor`, from `initial_seconds` to `max_seconds`."""

    initial_seconds: float
    max_seconds: float
    factor: float = 2.0
    stable_seconds: float = math.inf
    """A run that lasted this long, or longer, counts as a success: the delays start again from the initial one."""
    jitter: Callable[[], float] | None = None
    """Called for each delay; returns what to multiply it with. It keeps many processes from retrying together."""
    num_failures: int = 0
    """Failures in a row."""

    def next_seconds(self, ran_seconds: float = 0.0) -> float:
        """The delay after one more failure, of a run or a connection that lasted `ran_seconds`."""
        if ran_seconds >= self.stable_seconds:
            self.num_failures = 0
        self.num_failures += 1
        return self.delay_seconds(self.num_failures - 1)

    def delay_seconds(self, num_failures: int) -> float:
        """The delay after `num_failures` failures before the latest one. Changes nothing."""
        delay = min(self.initial_seconds * self.factor ** min(num_failures, _MAX_EXPONENT), self.max_seconds)
        return delay if self.jitter is None else delay * self.jitter()
