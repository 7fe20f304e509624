"""Filters decide what a search may find: a wrong answer shows a user what was to be left out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.errors import KvloomError
from orchestrator.search.filters import MAX_DEPTH, check, passes

HAS = {"year": 2024, "topic": "looms", "is_draft": False, "share": 0.5}


def one(kind: str, key: str, value: Any) -> dict[str, Any]:
    return {"type": kind, "key": key, "value": value}


@pytest.mark.parametrize(
    ("kind", "key", "value", "expected"),
    [
        ("eq", "year", 2024, True),
        ("eq", "year", 2024.0, True),
        ("eq", "year", "2024", False),
        ("eq", "is_draft", 0, False),
        ("eq", "is_draft", False, True),
        ("ne", "topic", "looms", False),
        ("ne", "unknown", "looms", True),
        ("gt", "year", 2023, True),
        ("gt", "year", 2024, False),
        ("gte", "year", 2024, True),
        ("lt", "share", 1, True),
        ("lte", "topic", "mills", True),
        ("lt", "topic", 5, False),
        ("gt", "is_draft", -1, False),
        ("lt", "unknown", 5, False),
        ("in", "topic", ["mills", "looms"], True),
        ("in", "unknown", ["looms"], False),
        ("nin", "topic", ["looms"], False),
        ("nin", "unknown", ["looms"], True),
    ],
)
def test_each_comparison(kind: str, key: str, value: Any, expected: bool) -> None:
    """Types are not converted, and what a file does not have is equal to nothing."""
    wanted = one(kind, key, value)
    check(wanted)
    assert passes(wanted, HAS) is expected


@given(st.lists(st.booleans(), min_size=1, max_size=5))
def test_joined_conditions_are_those_of_logic(truths: list[bool]) -> None:
    """Nested filters are what applications build access rules from."""
    parts = [one("eq", "year", 2024 if truth else 1999) for truth in truths]
    assert passes({"type": "and", "filters": parts}, HAS) is all(truths)
    assert passes({"type": "or", "filters": parts}, HAS) is any(truths)
    assert passes({"type": "and", "filters": [{"type": "or", "filters": parts}]}, HAS) is any(truths)


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        (one("eq", "year", None), "filters.value"),
        ({"type": "eq", "value": 1}, "filters.key"),
        (one("in", "year", 2024), "filters.value"),
        (one("eq", "year", [2024]), "filters.value"),
        (one("gt", "year", True), "filters.value"),
        ({"type": "and", "filters": []}, "filters.filters"),
        ({"type": "or", "filters": [one("eq", "a", 1), one("eq", "b", None)]}, "filters.filters[1].value"),
        ({"type": "and", "filters": [one("eq", "a", 1)] * 129}, "filters"),
    ],
)
def test_a_bad_filter_names_its_part(wanted: dict[str, Any], field: str) -> None:
    with pytest.raises(KvloomError) as caught:
        check(wanted)
    assert caught.value.field == field


def test_filters_are_not_nested_without_end() -> None:
    """Each level costs a call on the stack."""
    wanted = one("eq", "year", 2024)
    for _ in range(MAX_DEPTH - 1):
        wanted = {"type": "and", "filters": [wanted]}
    check(wanted)
    with pytest.raises(KvloomError, match="nested"):
        check({"type": "and", "filters": [wanted]})
