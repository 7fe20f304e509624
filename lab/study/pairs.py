"""Comparisons of two sets of runs that have the same draws: what differs from draw to draw then mostly cancels out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Final, NamedTuple

CONFIDENCE: Final = 0.95


class Interval(NamedTuple):
    """A mean with the half width of its confidence interval."""

    mean: float
    half_width: float


def compare_ratios(one: Mapping[int, float], other: Mapping[int, float]) -> Interval:
    """The mean of log (one / other) over the draws that both have, by seed. All figures are above 0."""
    return _interval([math.log(one[seed] / other[seed]) for seed in sorted(one.keys() & other.keys())])


def compare_differences(one: Mapping[int, float], other: Mapping[int, float]) -> Interval:
    """The mean of one - other over the draws that both have, by seed."""
    return _interval([one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())])


def _interval(values: list[float]) -> Interval:
    """Infinitely wide for fewer than two values. Raises ValueError for none."""
    if not values:
        raise ValueError("no draw is in both sets")
    num = len(values)
    if num < 2:
        return Interval(values[0], math.inf)
    deviation = statistics.stdev(values) / math.sqrt(num)
    return Interval(statistics.fmean(values), _student(num - 1) * deviation)


def _student(num_degrees: int) -> float:
    """The quantile of Student's distribution, by the expansion of Cornish and Fisher: within 1% from 4 degrees on, and
    too small with fewer."""
    z = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    n = num_degrees
    first = (z**3 + z) / (4 * n)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n * n)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    return z + first + second + third
