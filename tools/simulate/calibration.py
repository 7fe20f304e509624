"""How well the router's predictions came true: what placements predicted against what happened, term by term."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from tools.simulate.statistics import quantile
from tools.simulate.workload import Outcome

NUM_DECILES: Final = 10
CLOSE: Final = 0.25
"""A prediction is close if it differs from what happened by at most this share of it, or by CLOSE_SECONDS."""
CLOSE_SECONDS: Final = 0.005
"""Nobody notices less."""


class Decile(msgspec.Struct, frozen=True):
    """A tenth of the predictions, by what they predicted. The predictions are reliable where the two are equal."""

    predicted_seconds: float
    actual_seconds: float
    """Means."""


class Calibration(msgspec.Struct, frozen=True):
    """The predictions of one term, in seconds."""

    mean_error: float
    """Positive: it took longer than predicted."""
    p50_absolute_error: float
    p90_absolute_error: float
    share_within_25_percent: float
    deciles: list[Decile]
    """From the lowest predictions to the highest. [] for fewer predictions than deciles."""
    num_predictions: int


def calibrate(outcomes: Sequence[Outcome]) -> dict[str, Calibration]:
    """Returns the calibration of each term that was predicted, and that happened, at least once."""
    pairs: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for outcome in outcomes:
        for term, predicted, actual in outcome.predictions:
            if actual is not None:
                pairs[term].append((predicted, actual))
    return {term: _calibration(sorted(found)) for term, found in pairs.items()}


def _calibration(pairs: Sequence[tuple[float, float]]) -> Calibration:
    """`pairs`: (predicted, actual), ordered by what was predicted."""
    errors = [actual - predicted for predicted, actual in pairs]
    absolute = sorted(map(abs, errors))
    num_close = sum(
        abs(error) <= max(CLOSE * actual, CLOSE_SECONDS) for error, (_, actual) in zip(errors, pairs, strict=True)
    )
    return Calibration(
        statistics.fmean(errors),
        quantile(absolute, 0.5) or 0.0,
        quantile(absolute, 0.9) or 0.0,
        num_close / len(pairs),
        _deciles(pairs),
        len(pairs),
    )


def _deciles(pairs: Sequence[tuple[float, float]]) -> list[Decile]:
    if len(pairs) < NUM_DECILES:
        return []
    bounds = [number * len(pairs) // NUM_DECILES for number in range(NUM_DECILES + 1)]
    parts = [pairs[first:last] for first, last in itertools.pairwise(bounds)]
    return [
        Decile(math.fsum(one[0] for one in part) / len(part), math.fsum(one[1] for one in part) / len(part))
        for part in parts
    ]


def combine_calibrations(seeds: Sequence[Mapping[str, Calibration]]) -> dict[str, Any]:
    """Returns the means over the seeds of the terms that all of them have, as JSON objects."""
    terms = [term for term in seeds[0] if all(term in one for one in seeds)]
    return {term: _mean([one[term] for one in seeds]) for term in terms}


def _mean(of_seeds: Sequence[Calibration]) -> dict[str, Any]:
    rows = [msgspec.to_builtins(one) for one in of_seeds]
    mean: dict[str, Any] = {
        name: statistics.fmean(row[name] for row in rows)
        for name in ("mean_error", "p50_absolute_error", "p90_absolute_error", "share_within_25_percent")
    }
    mean["num_predictions"] = sum(row["num_predictions"] for row in rows)
    if all(row["deciles"] for row in rows):
        tenths = zip(*(row["deciles"] for row in rows), strict=True)
        mean["deciles"] = [
            {name: statistics.fmean(one[name] for one in tenth) for name in tenth[0]} for tenth in tenths
        ]
    else:
        mean["deciles"] = []
    return mean
