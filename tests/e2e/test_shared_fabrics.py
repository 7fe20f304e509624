"""Tests of a group share a fabric only if they run in one process."""

from __future__ import annotations

import os

import pytest

from tests.run_order import group_of


@pytest.mark.xdist_group("shared")
def test_the_id_of_a_test_ends_with_its_group(request: pytest.FixtureRequest) -> None:
    """The scheduler of tests/conftest.py goes by it: without it every process would start every fabric, unnoticed."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("there is one process")
    assert request.node.nodeid.endswith("@shared")


def test_a_test_of_a_shared_fabric_is_of_its_group(request: pytest.FixtureRequest) -> None:
    """One that was not started a fabric of its own, and looked like the others."""
    strays = {
        item.nodeid
        for item in request.session.items
        for name in getattr(item, "fixturenames", ())
        if name.endswith("_fabric") and group_of(item) != name.removesuffix("_fabric")
    }
    assert not strays
