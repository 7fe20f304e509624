"""How much of a limit is used in a second, of late: by that the size of a lease is chosen."""

from __future__ import annotations

import math
from typing import Final

SPARE_SECONDS: Final = 1.0
"""A lease is meant to cover the demand of this time."""


class Demand:
    __slots__ = ("_began_at", "_per_second", "num_taken")

    def __init__(self) -> None:
        self.num_taken = 0
        """Units since `_began_at`. Leases add to it."""
        self._per_second = 0.0
        """In the time before that."""
        self._began_at = -math.inf

    def expected(self, now: float) -> int:
        """Units that are needed in SPARE_SECONDS. A burst doubles its lease with each answer, so that few of its
        requests wait for one."""
        seconds = now - self._began_at
        if seconds >= SPARE_SECONDS:
            self._per_second = self.num_taken / seconds if seconds < math.inf else 0.0
            self.num_taken, self._began_at = 0, now
        return max(math.ceil(self._per_second * SPARE_SECONDS), self.num_taken)
