"""The scanner finds the end of any JSON value, and says when there is none."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom_common.parsers.core.json_scanner import MAX_DEPTH, JsonScanner

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(), values, max_size=3),
)


def end_of(text: str) -> tuple[int, bool]:
    scanner = JsonScanner()
    position = scanner.scan(text, 0, len(text))
    return position, scanner.done and not scanner.broken


@given(JSON, st.sampled_from([None, 1]), st.booleans(), st.sampled_from(["", " x", "}", "]]", ', "b"', '"']))
def test_a_value_ends_where_it_ends(value: object, indent: int | None, ascii_only: bool, rest: str) -> None:
    """What follows a value must not become a part of it, nor the other way round."""
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    if text[0] not in '{["' and rest[:1] not in ("", " ", "}", "]", ","):
        return
    position, done = end_of(text + rest)
    assert position == len(text)
    assert done or (not rest and text[0] not in '{["')


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ('{"a" 1}', 5),
        ('{"a": 1 2}', 8),
        ("{'a': 1}", 1),
        ('{"a": }', 6),
        ("[1}", 2),
        ('{"a": 1]', 7),
        ("<", 0),
        ("[" * (MAX_DEPTH + 1), MAX_DEPTH),
    ],
)
def test_a_broken_value_breaks_at_its_first_wrong_character(text: str, length: int) -> None:
    """What comes before it is delivered, what follows is text."""
    scanner = JsonScanner()
    assert scanner.scan(text, 0, len(text)) == length
    assert scanner.broken


@pytest.mark.parametrize("text", ['{"a": 1,}', "[1,]", '{"a": "\n"}', '{"a": "\\q"}', '{"a": True}'])
def test_what_models_write_is_let_through(text: str) -> None:
    """The end of such values is beyond doubt, and clients' JSON parsers may be lenient, too."""
    assert end_of(text) == (len(text), True)
