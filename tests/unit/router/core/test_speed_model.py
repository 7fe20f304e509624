"""What is learned about a shard's speed from the times of first tokens."""

from __future__ import annotations

import random

import pytest

from router.core.load.speed_model import PrefillWork, SpeedModel
from tools.simulate.fleet.profile import PROFILES, Profile


def seconds(profile: Profile, work: PrefillWork, num_context_tokens: int) -> float:
    """The fleet model's time for one prefill, with the decode of its steps."""
    num_steps = -(-work.num_tokens // profile.chunk_tokens)
    return (
        max(profile.step_floor_seconds * num_steps, profile.seconds_per_prefill_token * work.num_tokens)
        + profile.seconds_per_attention_pair * work.num_pairs
        + num_steps * profile.seconds_per_context_token * num_context_tokens
    )


def random_work(rng: random.Random) -> tuple[PrefillWork, int]:
    work = PrefillWork.of(int(rng.paretovariate(0.9) * 200) % 60_000 + 1, rng.randrange(80_000))
    return work, rng.randrange(300_000)


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize("reported", [0.0, 3_000.0])
def test_learns_the_fleet_model(name: str, reported: float) -> None:
    """Predictions are within 15% after 60 first tokens, whatever the shard had reported before, in spite of 10%
    noise."""
    profile, model, rng = PROFILES[name], SpeedModel(), random.Random(1)
    model.set_reported_rate(reported)
    for _ in range(60):
        work, context = random_work(rng)
        model.observe(work, context, seconds(profile, work, context) * rng.uniform(0.9, 1.1))
    errors = []
    for _ in range(200):
        work, context = random_work(rng)
        true = seconds(profile, work, context)
        errors.append(abs(model.seconds(work, context) - true) / true)
    errors.sort()
    assert errors[100] < 0.15


def test_a_shard_that_slows_down_is_found_out() -> None:
    """Forgetting: an observation a hundred requests ago no longer counts."""
    profile, model, rng = PROFILES["8b"], SpeedModel(), random.Random(2)
    for factor in (1.0, 3.0):
        for _ in range(150):
            work, context = random_work(rng)
            model.observe(work, context, factor * seconds(profile, work, context))
    work = PrefillWork.of(10_000, 0)
    assert model.seconds(work, 0) == pytest.approx(3 * seconds(profile, work, 0), rel=0.3)


def test_one_stall_changes_little() -> None:
    """A pause of a minute is not the shard's speed."""
    profile, model, rng = PROFILES["8b"], SpeedModel(), random.Random(3)
    for _ in range(100):
        work, context = random_work(rng)
        model.observe(work, context, seconds(profile, work, context))
    work = PrefillWork.of(10_000, 0)
    before = model.seconds(work, 0)
    model.observe(work, 0, 60.0)
    assert model.seconds(work, 0) < 1.6 * before


def test_same_work_for_ever_does_not_blow_up() -> None:
    """Without variety most coefficients cannot be determined: they must stay finite, and predictions sane."""
    model = SpeedModel()
    work = PrefillWork.of(500, 0)
    for _ in range(5_000):
        model.observe(work, 0, 0.05)
    assert model.seconds(work, 0) == pytest.approx(0.05, rel=0.05)
    assert 0 < model.seconds(PrefillWork.of(50_000, 0), 100_000) < 1_000


def test_the_reported_speed_counts_until_something_is_observed() -> None:
    """A new shard is priced by its own figure, and by a default without one."""
    model = SpeedModel()
    default = model.seconds(PrefillWork.of(1000, 0), 0)
    model.set_reported_rate(1_000.0)
    assert model.seconds(PrefillWork.of(1000, 0), 0) > 5 * default


def test_the_shortcut_for_one_request_is_equal_to_the_last_bit() -> None:
    """Placement computes it for every shard; a difference in the last bit would decide ties differently."""
    rng = random.Random(7)
    model = SpeedModel(SpeedModel())
    for _ in range(200):
        num_tokens, num_cached, num_context = rng.randrange(1, 9000), rng.randrange(9000), rng.randrange(100_000)
        work = PrefillWork.of(num_tokens, num_cached)
        assert model.request_seconds(num_tokens, num_cached, num_context) == model.seconds(work, num_context)
        model.observe(work, num_context, rng.random())
