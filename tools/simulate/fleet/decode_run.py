"""A stretch of steps that only decode, in closed form: each is longer than the one before by the same amount."""

from __future__ import annotations

import math
from typing import NamedTuple


class DecodeRun(NamedTuple):
    first_seconds: float
    """Of the first step."""
    growth_seconds: float
    """What each step takes more than the one before: its sequences have one token of context more each."""

    def seconds(self, num_steps: int) -> float:
        """Of the first `num_steps` steps."""
        return num_steps * self.first_seconds + self.growth_seconds * (num_steps * (num_steps - 1) // 2)

    def count_ended(self, elapsed_seconds: float) -> int:
        """Steps that have ended after so long."""
        slope = self.first_seconds - 0.5 * self.growth_seconds
        root = math.sqrt(slope * slope + 2 * self.growth_seconds * elapsed_seconds)
        count = int(2 * elapsed_seconds / (slope + root))
        # The formula may be off by rounding; `seconds` is what counts.
        while self.seconds(count + 1) <= elapsed_seconds:
            count += 1
        while count and self.seconds(count) > elapsed_seconds:
            count -= 1
        return count

    def count_until(self, elapsed_seconds: float) -> int:
        """Steps after which at least so much time has passed."""
        count = self.count_ended(elapsed_seconds)
        return count if self.seconds(count) >= elapsed_seconds else count + 1
