"""The figures of `kvloom-lab bench tenants`: differences within rounds, and how sure they are."""

from __future__ import annotations

import pytest

from lab.bench.tenants.paired import differences, estimate
from lab.bench.tenants.router_path import measure_router_path, router_path_table
from lab.bench.tenants.variants import ABOUT


@pytest.mark.parametrize(
    ("count", "low", "high", "confidence"), [(1, 0, 0, 0.0), (5, 0, 4, 0.938), (6, 0, 5, 0.969), (9, 1, 7, 0.961)]
)
def test_an_interval_is_as_narrow_as_its_confidence_allows(count: int, low: int, high: int, confidence: float) -> None:
    """These are the sign test's, as tables have them; with few rounds it is said that less is certain."""
    found = estimate([float(value) for value in range(count)][::-1])
    assert (found.median, found.low, found.high) == ((count - 1) / 2, low, high)
    assert found.confidence == pytest.approx(confidence)


def test_what_slows_a_whole_round_down_is_no_difference() -> None:
    """On a shared machine rounds differ by more than the variants do."""
    noise = [0.0, 300.0, 20.0, 150.0, 0.0, 80.0]
    found = differences([100 + one for one in noise], [160 + one for one in noise])
    assert (found.median, found.low, found.high) == (60.0, 60.0, 60.0)


async def test_the_router_can_be_measured_alone() -> None:
    """The quick figure: every variant serves, and says how often it has to ask for leases."""
    report = await measure_router_path(num_rounds=1, max_seconds=1.0)
    assert list(report["variants"]) == list(ABOUT)
    assert report["variants"]["15 limits"]["questions_per_1000_requests"].keys() <= {"redis", "control"}
    assert all(name in router_path_table(report) for name in ABOUT)
