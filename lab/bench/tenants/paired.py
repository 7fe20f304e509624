"""Figures that were measured alternately: what one variant has over another, and how sure that is.

The figures of one round have the same noise of the machine, so the difference is taken within each round.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

CONFIDENCE = 0.95


class Interval(NamedTuple):
    """Positions in the sorted values, both inclusive."""

    low: int
    high: int


class Estimate(msgspec.Struct, frozen=True):
    """The median of some values."""

    median: float
    low: float
    """The true median is between `low` and `high`, with a probability of at least `confidence`."""
    high: float
    confidence: float
    """Less than CONFIDENCE if there are fewer than six values."""


def estimate(values: Sequence[float]) -> Estimate:
    """Without an assumption about how the values are distributed: by the sign test's interval, which is between two of
    the values. There must be a value."""
    ordered = sorted(values)
    interval, confidence = _interval(len(ordered))
    return Estimate(
        round(statistics.median(ordered), 3),
        round(ordered[interval.low], 3),
        round(ordered[interval.high], 3),
        round(confidence, 3),
    )


def differences(reference: Sequence[float], other: Sequence[float]) -> Estimate:
    """Estimates what `other` has over `reference`; each has one value of every round."""
    return estimate([after - before for before, after in zip(reference, other, strict=True)])


def _interval(count: int) -> tuple[Interval, float]:
    """The narrowest interval with CONFIDENCE, or the widest one there is, and its confidence."""
    found = Interval(0, count - 1), _coverage(count, 0)
    for low in range(1, count // 2):
        confidence = _coverage(count, low)
        if confidence < CONFIDENCE:
            break
        found = Interval(low, count - 1 - low), confidence
    return found


def _coverage(count: int, low: int) -> float:
    """How probable it is that more than `low` values are on each side of the true median."""
    return max(0.0, 1.0 - 2.0 * sum(math.comb(count, below) for below in range(low + 1)) / 2.0**count)
