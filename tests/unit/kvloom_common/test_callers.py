"""Callers are told apart by their credentials, or else by their addresses."""

from __future__ import annotations

from pathlib import Path

from kvloom_common.callers import Callers
from kvloom_common.tenancy.table import Tenant
from tests.fakes.tenants import callers_of


def test_a_credential_names_its_caller_wherever_it_comes_from() -> None:
    """A client that moves to another network must find its cache and its responses again."""
    callers = Callers(b"key")
    assert callers.name("Bearer a", "10.0.0.1") == callers.name("Bearer a", "10.0.0.2")
    assert callers.name("Bearer a", "10.0.0.1") != callers.name("Bearer b", "10.0.0.1")


def test_anonymous_callers_are_their_addresses_unless_they_share() -> None:
    """Two machines without credentials must not read from each other's cache without being asked."""
    callers = Callers()
    assert callers.name("", "10.0.0.1") != callers.name("", "10.0.0.2")
    assert Callers(anonymous_share=True).name("", "10.0.0.1") == ""


def test_a_name_does_not_reveal_the_credential() -> None:
    """Names are written to logs: readers of the logs must not be able to test guesses without the key."""
    assert "secret" not in Callers(b"key").name("Bearer secret", "10.0.0.1")
    assert Callers(b"key").name("Bearer secret", "") != Callers(b"other").name("Bearer secret", "")


def test_a_request_adds_to_the_guardrails_of_its_tenant(tmp_path: Path) -> None:
    """It cannot leave one out, and names none twice."""
    callers = callers_of(tmp_path, [Tenant("acme/search", guardrails=("codes", "names"))])
    assert callers.guardrails("acme/search", None) == ("codes", "names")
    assert callers.guardrails("acme/search", ["cards", "codes"]) == ("codes", "names", "cards")
    assert callers.guardrails("acme/other", ["cards"]) == ["cards"]
    assert list(Callers().guardrails("key-alice", None)) == []
