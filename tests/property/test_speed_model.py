"""What the speed model makes of any first tokens: it recovers what they tell, and is honest about what they do not."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.load.speed_model import PrefillWork, SpeedModel
from tests.examples import num_examples

PRIOR = SpeedModel().coefficients
SLOWNESS = st.floats(-3, 2).map(lambda power: 10**power)
"""From a simulated engine of 10 million tokens a second to a CPU with 100."""
PROPORTION = 2.0
SHAPES = st.lists(st.floats(1 / PROPORTION, PROPORTION), min_size=4, max_size=4)
"""How much the coefficients differ from the prior's beside the slowness."""
WORK = st.builds(PrefillWork.of, st.integers(1, 100_000), st.integers(0, 100_000))


def true_seconds(factors: list[float], work: PrefillWork, num_context_tokens: int) -> float:
    request, token, pair, context = (one * factor for one, factor in zip(PRIOR.values(), factors, strict=True))
    return (
        work.num_requests * (request + context * num_context_tokens) + token * work.num_tokens + pair * work.num_pairs
    )


def random_work(rng: random.Random) -> tuple[PrefillWork, int]:
    work = PrefillWork.of(int(10 ** rng.uniform(0, 5)), rng.choice([0, int(10 ** rng.uniform(1, 5))]))
    return work, rng.choice([0, rng.randrange(500_000)])


@settings(max_examples=num_examples(15), deadline=None)
@given(slowness=SLOWNESS, shape=SHAPES, seed=st.integers(0, 1_000))
def test_varied_work_tells_the_coefficients(slowness: float, shape: list[float], seed: int) -> None:
    """Whatever the machine, each part of the cost is found if work differs in it, so that any other work is predicted
    well."""
    rng, model = random.Random(seed), SpeedModel()
    factors = [slowness * one for one in shape]
    for _ in range(300):
        work, context = random_work(rng)
        seconds = true_seconds(factors, work, context)
        model.observe(work, context, seconds)
    for _ in range(20):
        work, context = random_work(rng)
        seconds = true_seconds(factors, work, context)
        if seconds > 0.01:
            assert model.seconds(work, context) == pytest.approx(seconds, rel=0.15)


@settings(max_examples=num_examples(40), deadline=None)
@given(
    slowness=SLOWNESS, shape=SHAPES, seen=WORK, asked=WORK, context=st.integers(0, 500_000), count=st.integers(1, 60)
)
def test_one_kind_of_work_tells_no_more_than_how_fast_the_machine_is(
    slowness: float, shape: list[float], seen: PrefillWork, asked: PrefillWork, context: int, count: int
) -> None:
    """What such work cannot tell stays as the prior has it: the prediction of any other work is as far off as the
    machine's proportions are from the prior's, and no further."""
    factors = [slowness * one for one in shape]
    fleet = SpeedModel()
    model = SpeedModel(fleet)
    seconds = true_seconds(factors, seen, context)
    if seconds < 0.002:
        return
    for _ in range(count):
        model.observe(seen, context, seconds)
        fleet.observe(seen, context, seconds)
    assert model.seconds(seen, context) == pytest.approx(seconds, rel=0.05)
    true = true_seconds(factors, asked, context)
    assert true / PROPORTION**2 / 1.05 <= model.seconds(asked, context) <= true * PROPORTION**2 * 1.05


@settings(max_examples=num_examples(40), deadline=None)
@given(
    observations=st.lists(st.tuples(WORK, st.integers(0, 500_000), st.floats(1e-4, 1e4)), max_size=30),
    num_tokens=st.integers(1, 99_999),
    num_cached=st.integers(0, 100_000),
    context=st.integers(0, 500_000),
)
def test_more_work_never_takes_less_time(
    observations: list[tuple[PrefillWork, int, float]], num_tokens: int, num_cached: int, context: int
) -> None:
    """Whatever was seen, even nonsense: another token costs something, and more context or more before it is never
    cheaper. Otherwise a placement would prefer a longer prefill."""
    fleet = SpeedModel()
    model = SpeedModel(fleet)
    for work, at_context, seconds in observations:
        model.observe(work, at_context, seconds)
        fleet.observe(work, at_context, seconds)
    seconds = model.request_seconds(num_tokens, num_cached, context)
    assert 0 < seconds < 1e12
    assert model.request_seconds(num_tokens + 1, num_cached, context) > seconds
    assert model.request_seconds(num_tokens, num_cached + 1, context) >= seconds
    assert model.request_seconds(num_tokens, num_cached, context + 1) >= seconds
    assert 0 <= model.deviation_seconds(PrefillWork.of(num_tokens, num_cached), context) < 1e13


@settings(max_examples=num_examples(15), deadline=None)
@given(slowness=SLOWNESS, seed=st.integers(0, 1_000))
def test_uncertainty_is_low_only_where_work_was_seen(slowness: float, seed: int) -> None:
    """After many short suffixes of long cached prompts, the time of such a one is known, and that of a cold prompt is
    not: the deviation says which, and a cold prompt teaches it."""
    rng, model = random.Random(seed), SpeedModel()
    factors = [slowness] * 4
    cold = PrefillWork.of(99_000, 0)
    before = model.deviation_seconds(cold, 0)
    assert before > 0.5 * model.seconds(cold, 0), "nothing is known yet"
    for _ in range(40):
        work = PrefillWork.of(rng.randrange(4_500, 5_500), 94_000)
        model.observe(work, 0, true_seconds(factors, work, 0) * rng.uniform(0.95, 1.05))
    usual = PrefillWork.of(5_000, 94_000)
    assert model.deviation_seconds(usual, 0) < 0.05 * model.seconds(usual, 0)
    unsure = model.deviation_seconds(cold, 0)
    assert unsure > 0.05 * model.seconds(cold, 0)
    for _ in range(10):
        model.observe(cold, 0, true_seconds(factors, cold, 0) * rng.uniform(0.95, 1.05))
    assert model.deviation_seconds(cold, 0) < 0.5 * unsure
