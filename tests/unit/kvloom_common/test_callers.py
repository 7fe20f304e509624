"""Callers are told apart by their credentials, or else by their addresses."""

from __future__ import annotations

from kvloom_common.callers import Callers


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
