"""Patterns of JSON Schema in the syntax of the guides' compilers."""

from __future__ import annotations

import pytest

from kvloom_common.json_schema.patterns import PatternError, translated


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        (r"^[a-b]+\/[c\-d]{1,3}$", r"^[a-b]+\/[c\-d]{1,3}$"),
        (r"^\_\e\-$", r"^_e\-$"),
        ("^{a}[[&&]$", r"^\{a\}[\[\&\&]$"),
        (r"[a-\d]", r"[a\-\d]"),
        (r"\x41\u00e9\cA\0", r"\x41\xe9\x01\x00"),
        (r"\ud83d\ude00\u{1F600}", r"\u{1f600}\u{1f600}"),
        (r"(?<year>\d{4})(?P<m>\d\d)", r"(?:\d{4})(?:\d\d)"),
        ("a+?b{2,}?", "a+b{2,}"),
        ("a{,3}", r"a\{,3\}"),
        ("[^][]", r"[\s\S][^\s\S]"),
        (r"\Aab\Z", "^ab$"),
        ("^a|b$", "^a|b$"),
        ("(?i)a(?i:b)", "(?i)a(?i:b)"),
        (r"[\b\p{L}]\P{Lu}", r"[\x08\p{L}]\P{Lu}"),
    ],
)
def test_patterns_are_translated_once(pattern: str, wanted: str) -> None:
    """A guide is translated where it is made and where it is compiled."""
    assert translated(pattern) == wanted
    assert translated(wanted) == wanted


@pytest.mark.parametrize(
    ("pattern", "word"),
    [
        ("(?=a)b", "look-ahead"),
        ("(?<!a)b", "look-behind"),
        (r"(a)\1", "back-reference"),
        (r"\bfoo", "word boundary"),
        ("a^b", "assertion"),
        ("a$b", "assertion"),
        ("(a", "not closed"),
        ("a)", "not open"),
        ("[a", "not closed"),
        ("+a", "repeats nothing"),
        ("a**", "repeats nothing"),
        ("a{3,2}", "at most"),
        ("a{1,9000}", "more than 5000"),
        ("a\\", "backslash"),
        (r"\ud83d", "half a character"),
        ("(?#x)", "unknown kind"),
        ("(" * 65 + ")" * 65, "64 deep"),
        ("a" * 5000, "longer"),
    ],
)
def test_what_no_automaton_can_do_is_named(pattern: str, word: str) -> None:
    """An author of a schema reads why, and never a compiler's own words."""
    with pytest.raises(PatternError, match=word):
        translated(pattern)
