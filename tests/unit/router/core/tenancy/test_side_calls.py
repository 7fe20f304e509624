"""Limits of calls that compute no answer: they count like requests, occupy nothing and cost nothing."""

from __future__ import annotations

import itertools

from kvloom.errors import reason_name
from kvloom_common.tenancy.limits import Limits
from router.core.actions import Action, LeasesWanted, LimitsCounted, SideCallDecided
from router.core.events import SideCallArrived, SideCallSettled, Tick
from router.core.tenancy.side_calls import HOLD_SECONDS, MAX_HELD
from tests.fakes.core_rig import has
from tests.fakes.limited_rig import LimitedRig, error_of, tenant_table

_numbers = itertools.count()


def call(world: LimitedRig, num_tokens: int = 10, *, key: str = "k1", tenant: str = "acme/web") -> list[Action]:
    event = SideCallArrived(next(_numbers), tenant, key, num_tokens)
    return world.note(world.rig.handle(event))


def outcomes(actions: list[Action]) -> list[str]:
    """Of decided calls: "" or the reason of the refusal."""
    decided = [action for action in actions if isinstance(action, SideCallDecided)]
    return ["" if one.error is None else reason_name(one.error.reason) for one in decided]


def test_a_call_without_limits_makes_nothing() -> None:
    """It is decided at once, and no account is kept for it."""
    world = LimitedRig(tenant_table())
    actions = call(world)
    assert outcomes(actions) == [""]
    assert not has(actions, LeasesWanted)
    assert world.limiter.num_accounts == 0


def test_calls_and_requests_share_the_limit_of_requests() -> None:
    """A tenant must not have twice as much by calling something else."""
    world = LimitedRig(tenant_table(tenant=Limits(requests_per_minute=10)))
    assert [outcomes(call(world)) for _ in range(6)] == [[""]] * 6
    assert [error_of(world.submit(f"r{i}")) for i in range(5)] == [""] * 4 + ["RATE_LIMITED"]
    assert outcomes(call(world)) == ["RATE_LIMITED"]
    world.rig.now += 6.0
    assert outcomes(call(world)) == [""]


def test_the_tokens_that_a_call_reads_count() -> None:
    """What was expected is taken at once, and corrected when it is known; a text larger than a minute's tokens can
    never be read."""
    world = LimitedRig(tenant_table(key=Limits(tokens_per_minute=1000)))
    assert outcomes(call(world, 600)) == [""]
    assert outcomes(call(world, 600)) == ["RATE_LIMITED"]
    world.note(world.rig.handle(SideCallSettled("acme/web", "k1", -500)))
    assert outcomes(call(world, 600)) == [""]
    world.note(world.rig.handle(SideCallSettled("acme/web", "k1", 5000)))
    assert outcomes(call(world, 1)) == ["RATE_LIMITED"]
    assert outcomes(call(world, 1001)) == ["REQUEST_TOO_LARGE"]
    world.rig.now += 120.0
    assert outcomes(call(world, 600)) == [""]


def test_a_refused_call_burns_nothing_and_says_when_to_retry() -> None:
    """All accounts or none; and the pause that it names is enough."""
    world = LimitedRig(tenant_table(key=Limits(requests_per_minute=60), tenant=Limits(tokens_per_minute=100)))
    assert outcomes(call(world, 100)) == [""]
    for _ in range(5):
        [decided] = [one for one in call(world, 50) if isinstance(one, SideCallDecided)]
        assert decided.error is not None
        assert decided.error.limit == "tenant:acme/web tokens_per_minute"
        assert decided.error.limits is not None
        assert decided.error.limits.requests is not None
        assert decided.error.limits.requests.remaining == 59
    world.rig.now += decided.error.retry_after_seconds
    assert outcomes(call(world, 50)) == [""]


def test_a_call_is_held_until_its_lease_arrives_and_no_longer_than_a_request() -> None:
    """Nobody knows how much is left before Redis has said so. Without an answer the router's own bucket decides."""
    world = LimitedRig(tenant_table(key=Limits(requests_per_minute=10)))
    first = world.rig.handle(SideCallArrived(1, "acme/web", "k1", 5))
    assert outcomes(first) == []
    world.note(first, grants=False)
    world.rig.core.check_integrity()
    assert outcomes(world.grant()) == [""]

    world = LimitedRig(tenant_table(key=Limits(requests_per_minute=10)))
    world.note(world.rig.handle(SideCallArrived(1, "acme/web", "k1", 5)), grants=False)
    deadline = world.rig.core.next_deadline()
    assert deadline is not None
    assert deadline <= world.rig.now + HOLD_SECONDS
    world.rig.now += HOLD_SECONDS
    assert outcomes(world.note(world.rig.handle(Tick()), grants=False)) == [""]
    world.rig.core.check_integrity()


def test_calls_that_wait_are_bounded() -> None:
    """Redis may be away while a client sends what it can."""
    world = LimitedRig(tenant_table(key=Limits(requests_per_minute=100_000)))
    found = [outcomes(world.note(world.rig.handle(SideCallArrived(i, "acme/web", "k1", 5)), grants=False))
             for i in range(MAX_HELD + 3)]  # fmt: skip
    assert found == [[]] * MAX_HELD + [["OVERLOADED"]] * 3
    world.rig.core.check_integrity()


def test_a_call_takes_no_slot_and_no_budget() -> None:
    """Slots and budgets are of answers."""
    world = LimitedRig(tenant_table(tenant=Limits(max_concurrent_requests=1, tokens_per_day=10)))
    assert [outcomes(call(world, 500)) for _ in range(5)] == [[""]] * 5
    assert error_of(world.submit(max_tokens=3)) == ""


def test_shadow_limits_count_calls_and_refuse_none() -> None:
    """As for requests."""
    world = LimitedRig(tenant_table(tenant=Limits(requests_per_minute=2, shadow=True)))
    log = [action for _ in range(4) for action in call(world)]
    assert outcomes(log) == [""] * 4
    counts = [count for one in log if isinstance(one, LimitsCounted) for count in one.counts]
    assert [count.outcome for count in counts if count.outcome == "would_refuse"] == ["would_refuse"] * 2
