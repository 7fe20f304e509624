"""The statistics of the likelihood gap: what they estimate, that they merge, and how often they are wrong."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom_common.models import likelihood_gap as lg
from kvloom_common.models.likelihood_gap import (
    GapSums,
    gap_interval,
    gap_sums_of,
    lower_bound_at_any_time,
    num_answers_until,
)

Answers = list[tuple[int, float]]
answers = st.lists(st.tuples(st.integers(1, 2000), st.floats(-500, 500)), min_size=10, max_size=60)


def sums_of(of: Sequence[tuple[int, float]]) -> GapSums:
    sums = GapSums()
    for num_tokens, gap in of:
        sums += GapSums.of(num_tokens, gap)
    return sums


@given(answers, st.integers(0, 60))
def test_parts_merge_and_subtract(of: Answers, at: int) -> None:
    """Each router has its part of the answers, and a window is a difference: both must give the same estimate."""
    whole, first, rest = sums_of(of), sums_of(of[:at]), sums_of(of[at:])
    for merged, wanted in ((first + rest, whole), (whole - first, rest)):
        assert merged.fields == pytest.approx(wanted.fields, rel=1e-9, abs=1e-3)


@given(answers)
def test_the_interval_is_that_of_the_residuals(of: Answers) -> None:
    """The sums must give what the textbook's formula gives from the answers themselves."""
    total = sum(n for n, _ in of)
    ratio = sum(g for _, g in of) / total
    variance = sum((g - ratio * n) ** 2 for n, g in of) / (len(of) - 1)
    error = math.sqrt(variance / len(of)) * len(of) / total
    interval = gap_interval(sums_of(of))
    assert interval is not None
    assert interval.mean == pytest.approx(ratio, rel=1e-6, abs=1e-9)
    assert (interval.high - interval.low) / 2 == pytest.approx(1.959964 * error, rel=1e-4, abs=1e-5)


@given(answers, st.floats(0.1, 5))
def test_the_bound_at_any_time_is_the_wider_one(of: Answers, shift: float) -> None:
    """It holds for all numbers of answers together, so it cannot be above the one for a single number; and it grows
    with the gap."""
    sums, interval = sums_of(of), gap_interval(sums_of(of), confidence=0.9)
    assert interval is not None
    assert lower_bound_at_any_time(sums) <= interval.low + 1e-9
    shifted = sums_of([(n, g + shift * n) for n, g in of])
    assert lower_bound_at_any_time(shifted) == pytest.approx(lower_bound_at_any_time(sums) + shift, abs=1e-3)


@given(st.lists(st.integers(1, 500), min_size=10, max_size=40), st.floats(-3, 3))
def test_without_scatter_the_gap_is_known_exactly(lengths: list[int], gap: float) -> None:
    """Equal models have the gap 0 in every answer, and must not be found different by rounding."""
    sums = sums_of([(n, gap * n) for n in lengths])
    assert sums.gap_per_token == pytest.approx(gap, abs=1e-9)
    assert lower_bound_at_any_time(sums) == pytest.approx(gap, abs=1e-3)


def test_few_answers_are_not_judged() -> None:
    """Three answers may all be odd ones: an interval from their scatter would be an invention."""
    few = sums_of([(10, 30.0)] * (lg.MIN_ANSWERS - 1))
    assert gap_interval(few) is None
    assert lower_bound_at_any_time(few) == -math.inf
    assert num_answers_until([(10, 30.0)] * 50, threshold=1.0) == lg.MIN_ANSWERS
    assert GapSums().gap_per_token == 0


def draw(rng: random.Random, mean: float) -> tuple[int, float]:
    """An answer whose gaps are skewed, as they are: most are small, some large, and long answers have larger ones."""
    num_tokens = rng.randint(10, 200)
    return num_tokens, num_tokens * mean * rng.lognormvariate(-0.32, 0.8)


def test_looking_after_every_answer_seldom_raises_a_false_alarm() -> None:
    """A candidate at the threshold must not be rolled back just because it is looked at often; an interval for a fixed
    number of answers, looked at as often, is shown to fail."""
    rng, num_runs, peeks = random.Random(1), 200, 400
    num_alarms = num_naive_alarms = 0
    for _ in range(num_runs):
        drawn = [draw(rng, 0.05) for _ in range(peeks)]
        num_alarms += num_answers_until(drawn, 0.05) is not None
        sums, is_naive_alarm = GapSums(), False
        for answer in drawn:
            sums += GapSums.of(*answer)
            interval = gap_interval(sums, confidence=0.9)
            is_naive_alarm = is_naive_alarm or (interval is not None and interval.low > 0.05)
        num_naive_alarms += is_naive_alarm
    assert num_alarms <= 0.05 * num_runs
    assert num_naive_alarms > 2 * num_alarms


def test_a_worse_candidate_is_found_soon() -> None:
    """Early detection is what the bound is for: at twice the threshold a hundred answers or so must do."""
    rng = random.Random(2)
    found = [num_answers_until([draw(rng, 0.1) for _ in range(400)], 0.05) for _ in range(50)]
    assert all(count is not None and count < 200 for count in found)


def test_scraped_counters_become_sums() -> None:
    """The supervisor has only what routers export, with and without the suffix that a scraper adds; other pairs and
    other metrics are none of its business."""
    pair = {"model": "a", "candidate": "b"}

    def exported(suffix: str) -> list[tuple[str, dict[str, str], float]]:
        return [
            (lg.ANSWERS + suffix, pair, 1),
            (lg.TOKENS + suffix, pair, 4),
            (lg.SURPRISAL + suffix, {**pair, "under": "model"}, 8),
            (lg.SURPRISAL + suffix, {**pair, "under": "candidate"}, 11),
            (lg.SQUARED_TOKENS + suffix, pair, 16),
            (lg.SURPRISAL_TOKENS + suffix, {**pair, "under": "model"}, 32),
            (lg.SURPRISAL_TOKENS + suffix, {**pair, "under": "candidate"}, 44),
            (lg.SQUARED_GAP + suffix, pair, 9),
            (lg.SQUARED_GAP + suffix, {"model": "a", "candidate": "c"}, 7),
            ("kvloom_router_requests" + suffix, {"model": "a"}, 3),
        ]

    two_routers = [*exported("_total"), *exported("")]
    assert gap_sums_of(two_routers, "a", "b") == GapSums.of(4, 3.0) + GapSums.of(4, 3.0)
    assert gap_sums_of([], "a", "b") == GapSums()
