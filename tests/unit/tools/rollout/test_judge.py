"""Whether a new version serves worse: bad ones are found soon, and good ones are not accused."""

from __future__ import annotations

import itertools
import math
import random
from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom_common.metrics.series import LATENCY_SECONDS
from kvloom_common.models.likelihood_gap import GapSums
from tools.supervisor.rollout.judge import (
    ALPHA,
    Counts,
    Decision,
    Looks,
    RolloutLimits,
    judge,
    quantile_at_least,
    quantile_at_most,
    rate_at_least,
    rate_at_most,
)

BOUNDS = (*LATENCY_SECONDS, math.inf)
LIMITS = RolloutLimits()
rates = st.tuples(st.integers(0, 400), st.integers(0, 400)).map(lambda pair: (min(pair), max(pair)))
alphas = st.floats(1e-6, 0.3)


def counts(num_requests: int, num_errors: int = 0, ttft: list[float] | None = None) -> Counts:
    buckets = [0] * len(BOUNDS)
    for seconds in ttft or []:
        buckets[bisect_left(BOUNDS, seconds)] += 1
    return Counts(num_requests, num_errors, BOUNDS, tuple(buckets))


@given(rates, alphas)
def test_the_bounds_of_a_rate_enclose_it(sample: tuple[int, int], alpha: float) -> None:
    """Otherwise every verdict would be wrong."""
    count, total = sample
    low, high = rate_at_least(count, total, alpha), rate_at_most(count, total, alpha)
    assert 0 <= low <= high <= 1
    assert not total or low <= count / total + 1e-9
    assert not total or high >= count / total - 1e-9
    assert rate_at_most(count, total, alpha / 2) >= high


@pytest.mark.parametrize(("total", "rate"), [(5, 0.3), (30, 0.02), (200, 0.5)])
def test_a_bound_is_wrong_no_more_often_than_stated(total: int, rate: float) -> None:
    """It is exact mathematics for any number of requests, small ones too: all outcomes are summed up."""
    alpha = 0.05
    wrong = sum(
        math.comb(total, k) * rate**k * (1 - rate) ** (total - k)
        for k in range(total + 1)
        if rate_at_most(k, total, alpha) < rate
    )
    assert wrong <= alpha


@given(st.lists(st.floats(0.001, 900), min_size=1, max_size=200), alphas, st.sampled_from([0.5, 0.9]))
def test_the_bounds_of_a_quantile_enclose_it(values: list[float], alpha: float, rank: float) -> None:
    """Buckets are coarse: the bounds must be those of the buckets around it."""
    found = counts(len(values), ttft=values)
    quantile = sorted(values)[math.ceil(rank * len(values)) - 1]
    assert quantile_at_least(found, rank, alpha) <= quantile <= quantile_at_most(found, rank, alpha)


@given(rates, st.integers(1, 50), st.integers(1, 50))
def test_more_errors_never_acquit(sample: tuple[int, int], more: int, look: int) -> None:
    """A version that is taken back for some errors is taken back for more of them."""
    num_errors, total = sample
    old = counts(500, 3)
    if judge(old, counts(total, num_errors), LIMITS, look).decision is Decision.ROLL_BACK:
        worse = counts(total, min(total, num_errors + more))
        assert judge(old, worse, LIMITS, look).decision is Decision.ROLL_BACK


def serve(rng: random.Random, num_requests: int, error_rate: float, seconds: float) -> Decision:
    """A step of 10%, which ends after so many requests of the new version."""
    looks, old, new = Looks(), counts(0), counts(0)
    old_ttft: list[float] = []
    new_ttft: list[float] = []
    errors = 0
    decision = Decision.WAIT
    for number in range(1, num_requests + 1):
        errors += rng.random() < error_rate
        old_ttft += (rng.lognormvariate(math.log(0.05), 0.5) for _ in range(9))
        new_ttft.append(rng.lognormvariate(math.log(seconds), 0.5))
        if looks.take(number, is_end=number == num_requests):
            old, new = counts(9 * number, 0, old_ttft), counts(number, errors, new_ttft)
            decision = judge(old, new, LIMITS, looks.count).decision
        if decision is Decision.ROLL_BACK:
            break
    return decision


def test_an_equal_version_is_continued() -> None:
    """False alarms must not be more than one in a hundred steps, although every step is looked at many times."""
    rng = random.Random(7)
    decisions = [serve(rng, 200, 0.0, 0.05) for _ in range(100)]
    assert decisions.count(Decision.ROLL_BACK) <= 100 * ALPHA + 2
    assert decisions.count(Decision.CONTINUE) >= 95


@pytest.mark.parametrize(("error_rate", "seconds", "num_requests"), [(1.0, 0.05, 10), (0.3, 0.05, 80), (0.0, 0.6, 80)])
def test_a_bad_version_is_found_within_few_requests(error_rate: float, seconds: float, num_requests: int) -> None:
    """Whoever is on the new version must not stay there for long."""
    rng = random.Random(11)
    found = [serve(rng, num_requests, error_rate, seconds) for _ in range(40)]
    assert found.count(Decision.ROLL_BACK) >= 38


def test_without_the_old_version_errors_still_count() -> None:
    """At a share of 100%, or on a fabric that was idle before, there is nothing to compare with."""
    verdict = judge(counts(0), counts(40, 30), LIMITS, 1)
    assert verdict.decision is Decision.ROLL_BACK
    assert "75.0% (30 of 40)" in verdict.reason
    assert judge(counts(0), counts(40, 0, [0.1] * 40), LIMITS, 1).decision is Decision.CONTINUE


def test_few_requests_are_no_reason_to_continue() -> None:
    """No news is no good news, unless the operator says so."""
    assert judge(counts(100), counts(19), LIMITS, 1).decision is Decision.WAIT
    assert judge(counts(100), counts(20), LIMITS, 1).decision is Decision.CONTINUE
    assert judge(counts(100), counts(0), RolloutLimits(min_requests=0), 1).decision is Decision.CONTINUE


def scored(*gaps: float) -> GapSums:
    """Thirty answers of ten tokens, with these gaps per token in turn."""
    return sum((GapSums.of(10, 10 * gap) for gap, _ in zip(itertools.cycle(gaps), range(30), strict=False)), GapSums())


def test_a_likelihood_gap_counts_once_it_is_certain() -> None:
    """Its bound may be looked at at any time, so that it decides, and not the mean."""
    limits = RolloutLimits(max_likelihood_gap=0.1)
    for gap, decision in (
        (None, Decision.CONTINUE),
        (GapSums(), Decision.CONTINUE),
        (scored(-0.3, 0.7), Decision.CONTINUE),
        (scored(0.13, 0.17), Decision.ROLL_BACK),
    ):
        assert judge(counts(100), counts(100), limits, 1, gap).decision is decision
    assert judge(counts(100), counts(100), LIMITS, 1, scored(5, 6)).decision is Decision.CONTINUE


@given(st.lists(st.integers(0, 5), max_size=300))
def test_looks_are_few(steps: list[int]) -> None:
    """Every look costs certainty: their number grows with the logarithm of the requests."""
    looks, total = Looks(), 0
    for total in itertools.accumulate(steps):
        looks.take(total, is_end=False)
    assert looks.count <= 2 + math.log(max(total, 1), 1.5)
    before = looks.count
    assert looks.take(total, is_end=True) in (True, False)
    assert not looks.take(total, is_end=True)
    assert looks.count <= before + 1
