"""One caller cannot take the memory that the others need, and what is held is counted exactly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.errors import KvloomError
from kvloom_common.limits.byte_budget import ByteBudget


def refusal(budget: ByteBudget, caller: str, num_bytes: int) -> str:
    with budget.lease(caller) as lease, pytest.raises(KvloomError) as raised:
        lease.take(num_bytes)
    assert raised.value.retry_after_seconds > 0
    return raised.value.reason_name


def test_one_caller_gets_its_share() -> None:
    """The others still find room, and the error says whose limit it was."""
    budget = ByteBudget(100, "request bodies")
    with budget.lease("one") as one, budget.lease("two") as two:
        one.take(50)
        assert refusal(budget, "one", 1) == "RATE_LIMITED"
        two.take(50)
        assert refusal(budget, "three", 1) == "OVERLOADED"
    assert budget.num_bytes == budget.num_leases == 0


def test_share_is_enough_for_one() -> None:
    """A body of the largest size is accepted, whatever the size of the budget."""
    budget = ByteBudget(100, "request bodies", least_share_bytes=80)
    with budget.lease("one") as one:
        one.take(80)


def test_callers_that_share_a_name_have_no_share() -> None:
    """With callers.anonymous = "shared" they may be all callers that there are."""
    budget = ByteBudget(100, "request bodies")
    with budget.lease("") as one:
        one.take(100)


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(0, 40))))
def test_everything_is_given_back(wanted: list[tuple[str, int]]) -> None:
    """A byte that stays counted would be lost for good."""
    budget = ByteBudget(100, "request bodies")
    leases = [(budget.lease(caller), num_bytes) for caller, num_bytes in wanted]
    for lease, num_bytes in leases:
        try:
            lease.take(num_bytes)
        except KvloomError:
            continue
    assert budget.num_bytes == sum(lease.num_bytes for lease, _ in leases) <= 100
    for lease, _ in leases:
        with lease:
            pass
    assert budget.num_bytes == budget.num_leases == 0
    for caller in "abc":
        budget.take(caller, 33)
