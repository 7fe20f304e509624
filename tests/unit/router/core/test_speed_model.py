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


def test_a_cold_prompt_is_predicted_from_first_tokens_of_short_suffixes() -> None:
    """A fast machine, whose prompts share 94,000 tokens: a new one of 99,000 takes 0.98 s there, and was predicted at
    0.55 s, or at 3.2 s where the first one had been cold, because a first observation could not say how fast the
    machine is."""

    def steps(num_tokens: int) -> float:
        return 0.02 * -(-num_tokens // 2048)

    for is_first_cold in (False, True):
        rng, fleet = random.Random(4), SpeedModel()
        model = SpeedModel(fleet)
        works = [PrefillWork.of(rng.randrange(4_500, 5_500), 94_000) for _ in range(20)]
        cold = PrefillWork.of(99_000, 0)
        for work in [cold, *works] if is_first_cold else works:
            for one in (model, fleet):
                one.observe(work, 0, steps(work.num_tokens))
        assert model.seconds(cold, 0) == pytest.approx(steps(99_000), rel=0.25)
        assert model.seconds(works[0], 0) == pytest.approx(steps(5_000), rel=0.15)


def test_a_slow_machine_is_believed_at_once() -> None:
    """A CPU computes 100 tokens a second where the default is 10,000: the first answers say so, not the hundredth."""
    model, rng = SpeedModel(), random.Random(6)
    for _ in range(3):
        work = PrefillWork.of(rng.randrange(100, 300), 0)
        model.observe(work, 0, 0.05 + 0.01 * work.num_tokens)
    assert model.seconds(PrefillWork.of(200, 0), 0) == pytest.approx(2.05, rel=0.1)


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
