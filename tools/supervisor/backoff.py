"""How long to wait before a process that died is started again: a pure policy."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(slots=True)
class Backoff:
    """Doubles from `first_seconds` up to `max_seconds`; begins anew once a run has lasted `stable_seconds`."""

    first_seconds: float = 0.2
    max_seconds: float = 15.0
    stable_seconds: float = 30.0
    num_failures: int = 0
    """In a row, short runs only."""

    def next_delay_seconds(self, ran_seconds: float) -> float:
        """The wait after a run that lasted `ran_seconds`."""
        if ran_seconds >= self.stable_seconds:
            self.num_failures = 0
        # The exponent is bounded, so that a process that fails for weeks does not make it overflow.
        delay = self.first_seconds * 2 ** min(self.num_failures, 32)
        self.num_failures += 1
        return min(delay, self.max_seconds)
