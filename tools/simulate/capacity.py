"""Finds the highest load that a fleet sustains, by bisection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tools.failures import CommandError

CAPACITY_GOODPUT: Final = 0.9
CAPACITY_PRECISION: Final = 0.02
_MAX_DOUBLINGS: Final = 12


def find_capacity(
    goodput_at: Callable[[float], float],
    start: float,
    *,
    goodput: float = CAPACITY_GOODPUT,
    precision: float = CAPACITY_PRECISION,
    whole_numbers: bool = False,
) -> float:
    """Returns the highest load at which `goodput_at` reaches `goodput`, up to the relative `precision` below it. If
    there are several crossings, it returns one of them.

    First `start` is doubled or halved until the result is bracketed. Raises CommandError if it is not within a factor
    of 4,096, or if a single user is too much.
    """
    low, high = _bracket(goodput_at, float(round(start)) if whole_numbers else start, goodput, whole_numbers)
    while high > low * (1 + precision) and not (whole_numbers and high - low <= 1):
        middle = (low * high) ** 0.5
        if whole_numbers:
            middle = min(max(float(round(middle)), low + 1), high - 1)
        if goodput_at(middle) >= goodput:
            low = middle
        else:
            high = middle
    return low


def _bracket(
    goodput_at: Callable[[float], float], start: float, goodput: float, whole_numbers: bool
) -> tuple[float, float]:
    """Returns the highest load known to be sustained and the lowest known not to be."""
    low: float | None = None
    high: float | None = None
    load = start
    for _ in range(_MAX_DOUBLINGS + 1):
        if goodput_at(load) >= goodput:
            low, next_load = load, load * 2
        else:
            high, next_load = load, load / 2
        if low is not None and high is not None:
            return low, high
        if whole_numbers:
            next_load = float(int(next_load))
        if next_load < (1 if whole_numbers else 1e-9):
            break
        load = next_load
    if low is None:
        raise CommandError(f"goodput stays below {goodput:.0%} down to a load of {load:g}")
    raise CommandError(f"goodput stays at {goodput:.0%} or above up to a load of {load:g}: the trace is too short")
