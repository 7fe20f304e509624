"""The smallest fleet of the simulator that meets the objective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tools.failures import CommandError

GOODPUT: Final = 0.9
"""The share of requests that must be within the objective."""
MAX_SIMULATED: Final = 512
_MAX_RUNS: Final = 24


def smallest_fleet(goodput_at: Callable[[int], float], start: int, goodput: float = GOODPUT) -> tuple[int, float]:
    """Return the smallest number of shards at which `goodput_at` reaches `goodput`, and what it is there, found by
    bisection from `start` on. Raises CommandError if even MAX_SIMULATED shards do not."""
    known: dict[int, float] = {}

    def reaches(count: int) -> bool:
        if count not in known:
            if len(known) >= _MAX_RUNS:
                raise CommandError(f"{_MAX_RUNS} simulations have not found the fleet")
            known[count] = goodput_at(count)
        return known[count] >= goodput

    low, high = 0, max(1, min(start, MAX_SIMULATED))
    while not reaches(high):
        if high == MAX_SIMULATED:
            raise CommandError(
                f"{MAX_SIMULATED} shards reach a goodput of {known[high]:.0%}: the simulator stops there"
            )
        low, high = high, min(high * 2, MAX_SIMULATED)
    step = 1
    while low == 0 and high > 1:
        below = max(1, high - step)
        if reaches(below):
            high, step = below, step * 2
        else:
            low = below
        if high == 1:
            break
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return high, known[high]
