"""Clocks that are set while an edge or a router runs."""

from __future__ import annotations

import pytest

from kvloom.errors import KvloomError
from kvloom_common.access.tenant_follower import SteadyClock
from kvloom_common.access.tenants import Tenants
from kvloom_common.tenancy.table import EXPIRED_SECONDS
from tests.fakes.fake_control import two_organisations
from tests.fakes.tenants import table_of

NOON = 1_764_072_000.0


class Clocks:
    """The machine's clock, which `jump` sets, and one that nothing sets."""

    def __init__(self) -> None:
        self.passed = 0.0
        self.jump = 0.0

    def wall(self) -> float:
        return NOON + self.passed + self.jump

    def monotonic(self) -> float:
        return 7.0 + self.passed


def test_a_table_does_not_become_new_when_the_clock_is_set_back() -> None:
    """A fabric whose owner was away served revoked keys for as many years as the clock was set back."""
    clocks = Clocks()
    tenants = Tenants(100.0, clocks.wall, clocks.monotonic)
    tenants.use(table_of(two_organisations()), clocks.wall())
    tenants.set_connected(True)
    tenants.set_connected(False)
    clocks.jump = -86_400.0
    clocks.passed += 99.0
    tenants.check_fresh()
    assert tenants.age_seconds == 99.0
    clocks.passed += 2.0
    with pytest.raises(KvloomError):
        tenants.check_fresh()
    tenants.set_connected(True)
    tenants.check_fresh()


def test_a_clock_that_is_set_forward_makes_a_followed_table_no_older() -> None:
    """Every caller of a machine would be refused because its time server is wrong."""
    clocks = Clocks()
    tenants = Tenants(100.0, clocks.wall, clocks.monotonic)
    tenants.use(table_of(two_organisations()), clocks.wall())
    tenants.set_connected(True)
    clocks.jump = 1e9
    tenants.check_fresh()
    assert tenants.age_seconds == 0


def test_keys_are_forgotten_by_a_clock_that_has_run_evenly_only() -> None:
    """Expired keys leave the table. A clock that was wrong for a minute took keys that were still valid."""
    clocks = Clocks()
    clock = SteadyClock(clocks.wall(), clocks.monotonic())

    def steady_seconds(passed: float) -> float:
        clocks.passed += passed
        return clock.steady_seconds(clocks.wall(), clocks.monotonic())

    assert steady_seconds(EXPIRED_SECONDS) == EXPIRED_SECONDS
    clocks.jump = 86_400.0
    assert steady_seconds(14.0) == 0
    assert steady_seconds(14.0) == 14.0
    clocks.jump = 0.0
    assert steady_seconds(14.0) == 0
    for _ in range(100):  # one that is adjusted
        clocks.jump += 0.5
        steady_seconds(60.0)
    assert steady_seconds(0.0) == 6000.0
