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
    """In both directions: an own one of the operator may be larger."""
    tiers = {"gold": {"requests_per_minute": 10, "tokens_per_day": 5}}
    for own, operator_set in (({"requests_per_minute": 99}, None), ({}, {"limits": {"requests_per_minute": 99}})):
        found = account_limits.effective("gold", own, tiers, operator_set)
        assert found == {"requests_per_minute": 99, "tokens_per_day": 5}
    assert account_limits.effective(None, {}, tiers) == {}


@pytest.mark.parametrize(
    ("operators", "own", "in_force"),
    [
        ({"tokens_per_day": 5}, {}, {"tokens_per_day": 5}),
        ({"tokens_per_day": 5}, {"tokens_per_day": 9}, {"tokens_per_day": 5}),
        ({"tokens_per_day": 5}, {"tokens_per_day": 3}, {"tokens_per_day": 3}),
        ({"tokens_per_day": 5}, {"requests_per_minute": 1}, {"tokens_per_day": 5, "requests_per_minute": 1}),
        ({"tokens_per_day": 5}, {"shadow": True}, {"tokens_per_day": 5}),
        ({"tokens_per_day": 5}, {"shadow": True, "tokens_per_day": 3}, {"tokens_per_day": 5}),
        ({"tokens_per_day": 5, "shadow": True}, {"tokens_per_day": 9}, {"tokens_per_day": 9}),
        ({"tokens_per_day": 5, "shadow": True}, {}, {"tokens_per_day": 5, "shadow": True}),
        ({"tokens_per_day": 5}, {"cached_token_percent": 0}, {"tokens_per_day": 5}),
        (
            {"tokens_per_day": 5, "cached_token_percent": 10},
            {"cached_token_percent": 50},
            {"tokens_per_day": 5, "cached_token_percent": 50},
        ),
        (
            {"tokens_per_day": 5, "cached_token_percent": 10},
            {},
            {"tokens_per_day": 5, "cached_token_percent": 10},
        ),
        ({}, {"tokens_per_day": 9, "cached_token_percent": 0}, {"tokens_per_day": 9, "cached_token_percent": 0}),
        ({"kv_share_percent": 5}, {"kv_share_percent": 90}, {"kv_share_percent": 5}),
        ({"tokens_per_day": 5}, {"kv_share_percent": 7}, {"tokens_per_day": 5, "kv_share_percent": 7}),
    ],
)
def test_of_the_operators_limits_and_an_administrators_the_stricter_ones_hold(
    operators: dict[str, int], own: dict[str, int], in_force: dict[str, int]
) -> None:
    """Only the operator lifts what the operator has set: not by a larger limit, a weight, or shadow mode."""
    assert account_limits.stricter(operators, own) == in_force


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
