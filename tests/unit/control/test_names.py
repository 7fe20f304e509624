"""Which names, scopes, models and times are valid."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from control.directory import names
from kvloom.enums import ErrorReason
from kvloom.errors import KvloomError

VALID: list[tuple[Callable[[Any, str], Any], list[Any]]] = [
    (names.organisation_id, ["a", "acme", "a-1", "1", "a" * 64]),
    (names.project_id, ["acme/search", "a/b", f"{'a' * 64}/{'b' * 64}"]),
    (names.user_id, ["ann", "ann@acme.com", "A.b_c+d-e", "acme/ann@acme.com"]),
    (names.identity, ["cert:CN=x", "oidc:login:ada", "cert:spiffe://a/b"]),
    (names.display_name, ["", "for the nightly jobs", "für Ännchen"]),
    (names.role, ["reader", "admin"]),
    (names.time, [0.0, 1e9]),
]
INVALID: list[tuple[Callable[[Any, str], Any], list[Any]]] = [
    (names.organisation_id, ["", "A", "-a", "a-", "a" * 65, "a b", "a/b", "a\n", "ä"]),
    (names.project_id, ["", "a", "a/", "/b", "a/b/c", "a/B", "a /b"]),
    (names.user_id, ["", "a b", "/b", "a/", "A/b", "a/b/c", "a" * 129, "ä"]),
    (names.identity, ["", "cn", ":x", "CN:x", "cert:", "cert:a b", f"cert:{'x' * 500}"]),
    (names.display_name, ["a\nb", "a" * 129, "\x1b[31m"]),
    (names.role, ["", "owner", "Admin"]),
    (names.time, [-1.0, math.nan, math.inf, 1e12]),
]


@pytest.mark.parametrize(("check", "text"), [(check, one) for check, all_ in VALID for one in all_])
def test_valid_ones_are_returned(check: Callable[[Any, str], Any], text: Any) -> None:
    """What users would expect to be a name is one."""
    assert check(text, "field") == text


@pytest.mark.parametrize(("check", "text"), [(check, one) for check, all_ in INVALID for one in all_])
def test_others_are_refused_with_their_field(check: Callable[[Any, str], Any], text: Any) -> None:
    """Names are parts of paths, of accounts ("tenant:a/b") and of log lines."""
    with pytest.raises(KvloomError) as info:
        check(text, "field")
    assert (info.value.reason, info.value.field) == (ErrorReason.INVALID_ARGUMENT, "field")


def test_models_are_names_and_beginnings_of_names() -> None:
    """A pattern that can never fit would lock a team out without a word."""
    assert names.models(["smol*", "a/b:c", "*", "smol*"], "f") == ["smol*", "a/b:c", "*"]
    for wrong in ("", "a*b", "**", "a b", "x" * 258):
        with pytest.raises(KvloomError):
            names.models([wrong], "f")
    with pytest.raises(KvloomError):
        names.models([f"m{number}" for number in range(257)], "f")


def test_scopes_have_one_order_and_a_default() -> None:
    """A key without scopes is one for requests."""
    assert names.scopes([], "f") == ["inference", "usage"]
    assert names.scopes(["admin", "usage", "admin"], "f") == ["usage", "admin"]
    with pytest.raises(KvloomError):
        names.scopes(["root"], "f")
