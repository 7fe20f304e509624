"""Times, amounts and limits as people write them."""

from __future__ import annotations

import pytest

from kvloom.v1.control_service_pb2 import Limits
from kvloom.v1.directory_service_pb2 import Quotas
from tools.cli.tenants import units
from tools.cli.tenants.orgs import given_quotas
from tools.failures import CommandError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 1090.0),
        ("1.5h", 6400.0),
        ("30d", 2_593_000.0),
        ("1970-01-02", 86_400.0),
        ("1970-01-01T01:00:00+01:00", 0.0),
        ("1970-01-01 00:00:05", 5.0),
    ],
)
def test_moments(text: str, seconds: float) -> None:
    """Durations count from now on, and dates are UTC wherever the command runs."""
    assert units.moment(text, now=1000.0) == seconds


@pytest.mark.parametrize("text", ["", "30", "d", "-1d", "soon", "2027-13-01"])
def test_what_is_no_moment(text: str) -> None:
    """A key that was to expire and does not is worse than a command that fails."""
    with pytest.raises(ValueError, match="30d"):
        units.moment(text, now=0.0)


def test_amounts_are_exact() -> None:
    """Floats would make 0.15 another price."""
    assert units.nanos("12.50") == 12_500_000_000
    assert units.nanos_per_token("0.15") == 150
    assert units.nanos_per_token("0.001") == 1
    assert units.shown_per_million(150) == "0.15"
    assert units.shown_nanos(12_500_000_000) == "12.5"
    for wrong in ("-1", "a", "nan", "inf", "0.0000000001"):
        with pytest.raises(ValueError):
            units.nanos(wrong)
    with pytest.raises(ValueError, match="digits"):
        units.nanos_per_token("0.0001")


def test_limits_are_shown_in_one_line() -> None:
    """Those that there are, with the budget in the currency."""
    assert units.shown_limits(Limits(cached_token_percent=100)) == "-"
    limits = Limits(requests_per_minute=5, monthly_budget_nanos=10**9, shadow=True, cached_token_percent=10)
    assert units.shown_limits(limits) == "requests_per_minute=5 monthly_budget=1 shadow cached_token_percent=10"


def test_quotas_are_given_by_name() -> None:
    """A quota that is misspelled must not be ignored."""
    assert given_quotas(["max_keys=7", "max_users=0"]) == Quotas(max_keys=7, max_users=0)
    for text in ("keys=7", "max_keys", "max_keys=-1", "max_keys=1e9", "max_keys=99999999999"):
        with pytest.raises(CommandError):
            given_quotas([text])
