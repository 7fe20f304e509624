"""How well two samples can be told apart, with its confidence interval."""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

NORMAL_QUANTILE = 1.959964
"""The quantile of 97.5%: two-sided, 95%."""


class Auc(NamedTuple):
    """The area under the ROC curve, and the ends of its 95% confidence interval."""

    value: float
    low: float
    high: float


def auc(positives: Sequence[float], negatives: Sequence[float]) -> Auc:
    """The chance that one of `positives` is larger than one of `negatives` (ties count half): 0.5 is guessing, 1 is
    certainty. Each needs two numbers. The variance is that of DeLong, DeLong and Clarke-Pearson (Biometrics 44, 1988).
    """
    of_positives, of_negatives = _placements(positives, negatives), _placements(negatives, positives)
    value = statistics.fmean(of_positives)
    variance = statistics.variance(of_positives) / len(positives) + statistics.variance(of_negatives) / len(negatives)
    half = NORMAL_QUANTILE * math.sqrt(variance)
    return Auc(value, value - half, value + half)


def _placements(own: Sequence[float], others: Sequence[float]) -> list[float]:
    """For each, the share of the others that are smaller; equal ones count half."""
    ordered = sorted(others)
    return [(bisect.bisect_left(ordered, one) + bisect.bisect_right(ordered, one)) / (2 * len(ordered)) for one in own]
