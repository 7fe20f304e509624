"""Properties of screening that hold for any text, however it is cut into pieces."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safety_svc.folding import fold, is_word
from safety_svc.look_alikes import fold_look_alikes
from safety_svc.policy import RuleSet, load_policy
from safety_svc.screen import AnswerScreener, check_prompt
from tests.examples import num_examples

POLICY = """
[[rules]]
name = "words"
phrases = ["aß", "a b", "ab", "é"]

[[rules]]
name = "parts"
phrases = ["bba", "ab!ab", "k k"]
whole_words = false

[[rules]]
name = "looks"
phrases = ["la b", "rnk"]
confusables = true

[[rules]]
name = "anywhere"
patterns = ['[!k]{2}3', '\\bb3\\b', 'a\\B3', '3ka\\B']
max_length = 3

[[rules]]
name = "prefixed"
patterns = ['k3{2,4}!', '(?m)^k!$', 'k3333b\\B']
prefixes = ["k3", "k!"]
max_length = 6
"""
WORDS = [
    ("ass", True),
    ("a b", True),
    ("ab", True),
    ("e\u0301", True),
    ("bba", False),
    ("ab!ab", False),
    ("k k", False),
    ("la b", True),
    ("rnk", True),
]
LOOK_ALIKES = [("la b", True), ("rnk", True)]

FRAGMENTS = [
    *"abAB! k3é\u0301ß\u200b\n1lImа\\nu0",
    "\\n",
    "\\u0061",
    "\\u0020",
    "\\ud83d",
    "\\ude00",
    "3ka",
    "k33!",
    "k3333",
    "ab!a",
    "b3",
    "a  b",
    "aS",
]
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)
cuts = st.lists(st.integers(0, 40), max_size=30)


def rules(tmp_path_factory) -> RuleSet:
    path: Path = tmp_path_factory.mktemp("policy") / "policy.toml"
    path.write_text(POLICY)
    return load_policy(path).answer


def first_forbidden(rules: RuleSet, text: str) -> int | None:
    """Return where the first forbidden passage of the whole text begins, by a naive search."""
    starts = [match.start() for p in rules.patterns if (match := p.expression.search(text)) is not None]
    for read, read_offsets in ((text, range(len(text))), as_json(text)):
        for words, fold_as in ((WORDS, fold), (LOOK_ALIKES, fold_look_alikes)):
            folded, offsets = fold_as(read)
            starts += [read_offsets[offsets[start]] for start in phrase_starts(words, folded)]
    return min(starts, default=None)


def as_json(text: str) -> tuple[str, list[int]]:
    """Return what JSON reads in its strings, character by character, and where each of the characters is written."""
    read, offsets, position = "", list[int](), 0
    while position < len(text):
        match = re.compile(r"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\u[0-9a-fA-F]{4}|\\[\"\\/bfnrt]|.", re.DOTALL).match(
            text, position
        )
        assert match is not None
        try:
            character = json.loads(f'"{match[0]}"') if match[0].startswith("\\") else match[0]
        except ValueError:
            character = match[0]
        read, position = read + character, match.end()
        offsets += [match.start()] * len(character)
    return read, offsets


def phrase_starts(words: list[tuple[str, bool]], folded: str) -> list[int]:
    starts: list[int] = []
    for phrase, whole in words:
        for start in range(len(folded)):
            end = start + len(phrase)
            if not folded.startswith(phrase, start):
                continue
            inside = start > 0 and is_word(folded[start - 1]) and is_word(folded[start])
            inside |= end < len(folded) and is_word(folded[end]) and is_word(folded[end - 1])
            if not (whole and inside):
                starts.append(start)
    return starts


def screen(rules: RuleSet, text: str, at: list[int]) -> tuple[list[int], bool]:
    """Return num_clear_chars after every push and after the close, and whether the answer was halted."""
    screener = AnswerScreener(rules)
    clear: list[int] = []
    pushed = 0
    for a, b in itertools.pairwise(sorted({0, len(text), *(cut % (len(text) + 1) for cut in at)})):
        screener.push(text[a:b])
        pushed = b
        clear.append(screener.num_clear_chars)
        assert clear[-1] <= pushed
        if screener.hit is not None:
            return clear, True
    screener.close()
    return [*clear, screener.num_clear_chars], screener.hit is not None


@pytest.mark.hypothesis
def test_what_must_not_be_seen_is_never_released_and_the_rest_is(tmp_path_factory) -> None:
    """For every cut, the answer is halted exactly if the whole text contains a forbidden passage. No part of the
    passage is ever clear, the clear part never shrinks, and an allowed text is clear to its end."""
    rule_set = rules(tmp_path_factory)

    @given(texts, cuts)
    @settings(max_examples=num_examples(1500), deadline=None)
    def law(text: str, at: list[int]) -> None:
        forbidden = first_forbidden(rule_set, text)
        clear, halted = screen(rule_set, text, at)
        assert halted is (forbidden is not None)
        assert clear == sorted(clear)
        assert clear[-1] == len(text) if forbidden is None else clear[-1] <= forbidden
        hit = check_prompt(rule_set, text)
        assert (hit and hit.start) == forbidden

    law()


@pytest.mark.hypothesis
def test_one_character_at_a_time(tmp_path_factory) -> None:
    """Single characters are the cut with the most boundaries."""
    rule_set = rules(tmp_path_factory)

    @given(texts)
    @settings(max_examples=num_examples(500), deadline=None)
    def law(text: str) -> None:
        forbidden = first_forbidden(rule_set, text)
        clear, halted = screen(rule_set, text, list(range(len(text))))
        assert halted is (forbidden is not None)
        assert clear[-1] == len(text) if forbidden is None else clear[-1] <= forbidden

    law()


@given(texts, cuts)
@settings(max_examples=num_examples(300))
def test_folding_the_parts_is_folding_the_whole(text: str, at: list[int]) -> None:
    """Deny lists see the same text however it was cut."""
    folded, offsets = "", []
    for a, b in itertools.pairwise(sorted({0, len(text), *(cut % (len(text) + 1) for cut in at)})):
        part, part_offsets = fold(text[a:b], after_space=folded.endswith(" "))
        folded += part
        offsets += [a + offset for offset in part_offsets]
    whole, whole_offsets = fold(text)
    assert (folded, offsets) == (whole, list(whole_offsets))
