"""Under an overload the brownout ladder keeps more requests within the objective than refusing alone, or nothing."""

from __future__ import annotations

import pytest

from router.core.rule_settings import BrownoutSettings
from tests.lab.dst.brownout_model import BrownoutPlan, find_capacity, measure

LADDER = BrownoutSettings().steps


@pytest.mark.long
def test_the_ladder_is_climbed_step_by_step_and_saves_refusals() -> None:
    """Degraded answers instead of refusals are what the ladder is for: a minute of overload already shows it."""
    plan = BrownoutPlan(overload_seconds=60.0)
    capacity = find_capacity(plan)
    whole, refusing = (measure(plan, capacity, steps) for steps in (LADDER, LADDER[-1:]))
    before, overload, _ = whole["phases"]
    assert before["good_share"] > 0.98
    assert overload["refused_share"] < 0.75 * refusing["phases"][1]["refused_share"]
    assert overload["mean_output_tokens"] < before["mean_output_tokens"]
    assert [step for _, step in whole["steps"]] == [1, 2, 3, 4, 3]


@pytest.mark.long
def test_the_ladder_keeps_goodput_at_three_times_capacity() -> None:
    """Degraded answers in time are what the ladder is for: several times the goodput of no ladder, and at least that of
    refusals alone with far fewer refusals; whole answers before the overload, and an end to it all after."""
    plan = BrownoutPlan(overload_seconds=200.0)
    capacity = find_capacity(plan)
    whole, refusing, without = (measure(plan, capacity, steps) for steps in (LADDER, LADDER[-1:], ()))
    before, overload, _ = whole["phases"]
    assert before["good_share"] > 0.98
    assert overload["goodput_per_second"] > 5 * without["phases"][1]["goodput_per_second"]
    assert overload["goodput_per_second"] >= refusing["phases"][1]["goodput_per_second"]
    assert overload["refused_share"] < 0.75 * refusing["phases"][1]["refused_share"]
    assert overload["mean_output_tokens"] < before["mean_output_tokens"]
    assert [step for _, step in whole["steps"]] == [1, 2, 3, 4, 3, 2, 1, 0]
