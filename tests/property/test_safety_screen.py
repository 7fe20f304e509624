"""Properties of screening that hold for any text, however it is cut into pieces."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.v1.safety_service_pb2 import ScreenRequest, ScreenResponse
from safety_svc.connection import ScreenConnection
from safety_svc.folding import fold, is_letter, is_word
from safety_svc.guardrails import Guardrails
from safety_svc.look_alikes import fold_look_alikes
from safety_svc.policy import RuleSet, load_policy
from safety_svc.policy_file import PolicyFile
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
name = "spaced"
phrases = ["bakk", "li m"]
confusables = true
spaced = true

[[rules]]
name = "spaced-parts"
phrases = ["kéb"]
spaced = true
whole_words = false

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
    ("bakk", True),
    ("li m", True),
    ("ke\u0301b", False),
]
LOOK_ALIKES = [("la b", True), ("rnk", True), ("bakk", True), ("ll rn", True)]
SPACED = [("bakk", True), ("lim", True), ("ke\u0301b", False)]
SPACED_LOOK_ALIKES = [("bakk", True), ("llrn", True)]

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
    "b.a k-",
    " - ",
    "k",
    "_l\u200b.i",
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
        for words, fold_as in ((SPACED, fold), (SPACED_LOOK_ALIKES, fold_look_alikes)):
            folded, offsets = fold_as(read)
            starts += [read_offsets[offsets[start]] for start in spaced_starts(words, folded)]
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


def spaced_starts(words: list[tuple[str, bool]], folded: str) -> list[int]:
    """Return where phrases begin between whose letters up to three other characters stand."""
    starts: list[int] = []
    for phrase, whole in words:
        for start in range(len(folded)):
            end = start
            for number, letter in enumerate(phrase):
                gap = 0
                while number and end < len(folded) and not is_letter(folded[end]):
                    gap, end = gap + 1, end + 1
                if gap > 3 or end == len(folded) or folded[end] != letter:
                    break
                end += 1
            else:
                inside = start > 0 and is_letter(folded[start - 1])
                inside |= end < len(folded) and is_letter(folded[end])
                if not (whole and inside):
                    starts.append(start)
    return starts


def pieces_of(text: str, at: list[int]) -> list[str]:
    bounds = sorted({0, len(text), *(cut % (len(text) + 1) for cut in at)})
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


def screen(rules: RuleSet, text: str, at: list[int]) -> tuple[list[int], bool]:
    """Return num_clear_chars after every push and after the close, and whether the answer was halted."""
    screener = AnswerScreener(rules)
    clear: list[int] = []
    pushed = 0
    for piece in pieces_of(text, at):
        screener.push(piece)
        pushed += len(piece)
        clear.append(screener.num_clear_chars)
        assert clear[-1] <= pushed
        if screener.hit is not None:
            return clear, True
    screener.close()
    return [*clear, screener.num_clear_chars], screener.hit is not None


@pytest.mark.hypothesis
@pytest.mark.timeout(300)
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


@pytest.mark.parametrize(("spaced", "most"), [("false", 5), ("true", 4 * 4)])
def test_what_is_withheld_is_bounded(tmp_path_factory, spaced: str, most: int) -> None:
    """By the phrase's length, and by four times its letters where they may be spaced out, as docs/operate/safety.md
    says: as characters are compared, in which white space is one and an invisible character none."""
    path: Path = tmp_path_factory.mktemp("policy") / "policy.toml"
    path.write_text(f'[[rules]]\nname = "r"\nphrases = ["ba kk"]\nwhole_words = false\nspaced = {spaced}\n')
    rule_set = load_policy(path).answer

    @given(st.lists(st.sampled_from(["b", "a", "k", " ", ".", "-", "_", "\u200b", "  \n", "b..a", "k"])).map("".join))
    @settings(max_examples=num_examples(200), deadline=None)
    def law(text: str) -> None:
        screener = AnswerScreener(rule_set)
        for end in range(1, len(text) + 1):
            screener.push(text[end - 1])
            if screener.hit is not None:
                return
            assert len(fold(text[screener.num_clear_chars : end])[0]) <= most

    law()


class Frames:
    """The stream of a router whose frames are known beforehand. It keeps what is written."""

    def __init__(self, frames: Sequence[ScreenRequest]) -> None:
        self._frames = deque(frames)
        self.written: list[ScreenResponse] = []

    async def read(self) -> ScreenRequest | None:
        return self._frames.popleft() if self._frames else None

    async def write(self, response: ScreenResponse) -> None:
        self.written.append(response)


@given(st.lists(st.tuples(texts, cuts), min_size=2, max_size=4), st.randoms(use_true_random=False))
@settings(max_examples=num_examples(60), deadline=None)
def test_answers_of_one_request_are_judged_apart(
    tmp_path_factory, answers: list[tuple[str, list[int]]], draw: random.Random
) -> None:
    """With n > 1, the pieces of several answers come in any order, some in one frame. Each answer is shown and halted
    as if it were alone, one in the other's words or not."""
    path: Path = tmp_path_factory.mktemp("policy") / "policy.toml"
    path.write_text(POLICY)
    policy_file = PolicyFile(str(path))
    waiting = {slot: pieces_of(text, at) for slot, (text, at) in enumerate(answers)}
    frames: list[ScreenRequest] = []
    while any(waiting.values()):
        slots = draw.sample([slot for slot, pieces in waiting.items() if pieces], 1)
        slots += [slot for slot, pieces in waiting.items() if pieces and slot not in slots and draw.random() < 0.5]
        frames.append(ScreenRequest(slots=slots, deltas=[waiting[slot].pop(0) for slot in slots]))
    frames.append(ScreenRequest(close_slots=list(range(len(answers)))))
    stream = Frames(frames)
    asyncio.run(ScreenConnection(policy_file, cast("Any", stream), lambda _: None, Guardrails()).serve())
    shown, halted = dict.fromkeys(range(len(answers)), 0), set[int]()
    for response in stream.written:
        shown |= dict(zip(response.slots, response.num_clear_chars, strict=True))
        shown |= {halt.slot: halt.num_clear_chars for halt in response.halts}
        halted |= {halt.slot for halt in response.halts}
    for slot, (text, at) in enumerate(answers):
        clear, is_halted = screen(policy_file.current.answer, text, at)
        assert is_halted == (slot in halted)
        assert shown[slot] == clear[-1] if is_halted else shown[slot] <= len(text)


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
