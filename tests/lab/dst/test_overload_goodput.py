"""Under more load than the fleet can serve, it still serves as much as it can."""

from __future__ import annotations

import pytest

from tests.lab.dst.overload_model import OverloadPlan, find_capacity, measure


@pytest.mark.parametrize(
    ("policy", "seed"),
    [
        pytest.param("ect", 1, marks=pytest.mark.long),
        ("ect", 2),
        pytest.param("least_requests", 3, marks=pytest.mark.long),
    ],
)
def test_goodput_holds_at_three_times_capacity(policy: str, seed: int) -> None:
    """A fabric that collapses under its load serves no request just when demand is highest."""
    plan = OverloadPlan(num_shards=1, policy=policy, seed=seed, seconds=80.0)
    capacity = find_capacity(plan)
    rows = [measure(plan, capacity, load, sheds_load_early=True) for load in (1.0, 1.5, 3.0)]
    peak = max(row["goodput_per_second"] for row in rows)
    assert peak > 0.85 * capacity
    assert rows[-1]["goodput_per_second"] >= 0.9 * peak
    assert rows[-1]["wasted_share"] < 0.2
    assert rows[-1]["given_up_late_share"] < 0.15  # refused requests fail at once


@pytest.mark.long
def test_without_shedding_there_is_little_left() -> None:
    """The model can tell the difference: without shedding the same load does collapse it."""
    plan = OverloadPlan(num_shards=1, seconds=60.0)
    row = measure(plan, find_capacity(plan), 2.0, sheds_load_early=False)
    assert row["good_share"] < 0.2


@pytest.mark.long
def test_a_fleet_with_room_refuses_hardly_anybody() -> None:
    """Early refusal is for overload: at half load it must not be noticeable."""
    plan = OverloadPlan(num_shards=1, seconds=80.0)
    row = measure(plan, find_capacity(plan), 0.5, sheds_load_early=True)
    assert row["refused_at_once_share"] < 0.01
