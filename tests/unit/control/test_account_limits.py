"""Limits as they are stored, and those of a tier under an account's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control.database.schema import MAX_INTEGER
from control.directory import account_limits
from kvloom.errors import KvloomError
from kvloom.v1.control_service_pb2 import Limits as LimitsMessage
from kvloom_common.tenancy.limits import Limits, limits_from_proto, limits_to_proto

limits = st.builds(
    Limits,
    requests_per_minute=st.integers(0, MAX_INTEGER),
    max_prompt_tokens=st.integers(0, 2**32 - 1),
    shadow=st.booleans(),
    cached_token_percent=st.integers(0, 200),
)


@given(limits)
def test_what_is_stored_is_shown(given_limits: Limits) -> None:
    """A limit that the database changes is another limit."""
    assert limits_from_proto(account_limits.shown(account_limits.stored(limits_to_proto(given_limits)))) == given_limits


def test_only_what_differs_from_the_defaults_is_stored() -> None:
    """So that a limit that kvloom adds later has its default, and a tier's holds."""
    assert account_limits.stored(LimitsMessage()) == {}
    assert account_limits.stored(LimitsMessage(cached_token_percent=0)) == {"cached_token_percent": 0}


def test_an_accounts_own_limit_goes_before_that_of_its_tier() -> None:
    """In both directions: an own one may be larger."""
    tiers = {"gold": {"requests_per_minute": 10, "tokens_per_day": 5}}
    found = account_limits.effective("gold", {"requests_per_minute": 99}, tiers)
    assert limits_from_proto(found) == Limits(requests_per_minute=99, tokens_per_day=5)
    assert limits_from_proto(account_limits.effective(None, {}, tiers)) == Limits()


def test_one_limit_is_set_or_taken_away_alone() -> None:
    """0 takes it away."""
    stored = {"requests_per_minute": 10, "tokens_per_day": 5}
    assert account_limits.with_limit(stored, LimitsMessage(tokens_per_day=6), "tokens_per_day") == {
        "requests_per_minute": 10, "tokens_per_day": 6,
    }  # fmt: skip
    assert account_limits.with_limit(stored, LimitsMessage(), "tokens_per_day") == {"requests_per_minute": 10}


def test_numbers_that_json_does_not_have_exactly_are_refused() -> None:
    """A budget must be what was typed, in every client."""
    with pytest.raises(KvloomError, match=str(MAX_INTEGER)):
        account_limits.stored(LimitsMessage(monthly_budget_nanos=MAX_INTEGER + 1))
