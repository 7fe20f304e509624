"""What the router learns about the reuse of cached blocks."""

from __future__ import annotations

import random

import pytest

from router.core.placement.reuse_curve import MAX_REMEMBERED_PROMPTS, ReuseCurve


def conversation(curve: ReuseCurve, number: int, gaps: list[float], start: float) -> float:
    """Prompts that each continue the one before; returns when the last arrived."""
    hashes = [number * 1000]
    curve.note_prompt(hashes, start)
    for gap in gaps:
        start += gap
        hashes = [*hashes, hashes[-1] + 1, hashes[-1] + 2]
        curve.note_prompt(hashes, start)
    return start


def test_before_anything_is_known_the_odds_are_even() -> None:
    """A new router neither hoards nor wastes."""
    assert ReuseCurve().probability(0.0) == pytest.approx(0.5, abs=0.05)


def test_one_off_questions_make_cached_blocks_cheap() -> None:
    """No prompt was ever continued: an evicted block will not be missed."""
    curve = ReuseCurve()
    for number in range(500):
        conversation(curve, number, [], number * 1.0)
    assert curve.probability(1.0) < 0.05


def test_agents_make_fresh_blocks_dear_and_old_ones_cheap() -> None:
    """With calls every ten seconds for a long time, a block that was just used will be used again, and one idle for an
    hour will not."""
    curve, rng = ReuseCurve(), random.Random(1)
    for number in range(60):
        conversation(curve, number, [rng.uniform(5, 15) for _ in range(20)], number * 1.0)
    fresh, aged, old = (curve.probability(age) for age in (1.0, 12.0, 3600.0))
    assert fresh > 0.9
    assert fresh > aged > old
    assert old < 0.2


def test_probability_never_rises_with_age() -> None:
    """Whatever the gaps were, longer idleness is never a better sign."""
    curve, rng = ReuseCurve(), random.Random(2)
    for number in range(100):
        conversation(curve, number, [rng.paretovariate(0.7) for _ in range(rng.randrange(8))], rng.uniform(0, 1e4))
    chances = [curve.probability(age) for age in (0.0, 0.3, 1.0, 3.0, 10.0, 100.0, 1e4, 1e7)]
    assert chances == sorted(chances, reverse=True)
    assert all(0.0 < chance < 1.0 for chance in chances)


def test_habits_that_change_are_noticed() -> None:
    """Counts decay: yesterday's agents do not keep today's one-off questions' blocks alive."""
    curve = ReuseCurve()
    for number in range(50):
        conversation(curve, number, [10.0] * 20, number * 1.0)
    before = curve.probability(1.0)
    for number in range(100, 6000):
        conversation(curve, number, [], number * 1.0)
    assert curve.probability(1.0) < 0.3 * before


def test_memory_is_bounded() -> None:
    """A router that lives for months remembers a fixed number of prompts."""
    curve = ReuseCurve()
    for number in range(MAX_REMEMBERED_PROMPTS + 100):
        curve.note_prompt([number + 1], float(number))
    assert curve.num_remembered == MAX_REMEMBERED_PROMPTS


def test_prompts_without_a_full_block_say_nothing() -> None:
    """They cannot be reused, so they are no evidence."""
    curve = ReuseCurve()
    before = curve.probability(1.0)
    curve.note_prompt([], 1.0)
    assert curve.probability(1.0) == before
