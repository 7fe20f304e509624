"""The router's prefilter is exact: text that it does not send to the safety service changes no policy's verdict."""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque

import re2
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvloom.v1.safety_service_pb2 import PolicyState, ScreenResponse
from router.links.prefilter import Outgoing, Prefilter, PrefilteredAnswers
from safety_svc.folding import fold, is_letter
from safety_svc.look_alikes import fold_look_alikes
from safety_svc.policy import Pattern, Phrase, Rule, RuleSet
from safety_svc.prefilter import MAX_BEGINNINGS, answer_prefilter
from safety_svc.screen import AnswerScreener
from tests.examples import num_examples

RULE = Rule("rule", "No.")
SLOT = 7
CHARACTERS = [*"aAbBcé \n\x1c\u200b\u0301ß\x00ﬁfi-1lmnrа", "  "]
ESCAPED = ["\\", "n", "\\n", "\\u0061", "\\u00", "\\ud83d", "\\udc00"]
texts = st.lists(st.sampled_from([*CHARACTERS, *ESCAPED, "abc", "a b", "xyz"]), max_size=14).map("".join)
words = st.lists(st.sampled_from(CHARACTERS), min_size=1, max_size=6).map("".join)
prefixes = st.lists(st.sampled_from("aAb-é"), min_size=1, max_size=3).map("".join)
anchors = st.sampled_from(["", r"\b", "(?m)^"])
deltas_of = st.lists(texts.filter(bool) | st.sampled_from("aAbB -"), max_size=10)


@st.composite
def rule_sets(draw: st.DrawFn, *, only_words: bool = False) -> RuleSet:
    phrases: list[Phrase] = []
    for text in draw(st.lists(words, max_size=4)):
        is_look_alike = draw(st.booleans())
        folded = (fold_look_alikes if is_look_alike else fold)(text)[0].strip()
        is_spaced = draw(st.booleans())
        if is_spaced:
            folded = "".join(filter(is_letter, folded))
        if folded:
            phrases.append(Phrase(RULE, folded, only_words or draw(st.booleans()), is_look_alike, is_spaced))
    patterns = [
        Pattern(RULE, re2.compile(f"{draw(anchors)}{prefix}[bc]{{1,2}}"), (prefix,), 6)
        for prefix in draw(st.lists(prefixes, max_size=2))
    ]
    return RuleSet(phrases, patterns)


@dataclasses.dataclass
class Service:
    """One slot of the safety service, fed by frames."""

    rules: RuleSet
    screener: AnswerScreener | None = None

    def answer(self, outgoing: Outgoing) -> ScreenResponse:
        response = ScreenResponse()
        self.screener = screener = self.screener or AnswerScreener(self.rules)
        if SLOT in outgoing.skips:
            assert screener.is_clear
            screener.skip(*outgoing.skips[SLOT])
        if SLOT in outgoing.deltas and screener.hit is None:
            screener.push(outgoing.deltas[SLOT])
            if screener.hit is None:
                response.slots.append(SLOT)
                response.num_clear_chars.append(screener.num_clear_chars)
        if outgoing.close_slots:
            if screener.hit is None:
                screener.close()
            response.closed_slots.append(SLOT)
        return response


def screen(rules: RuleSet, deltas: list[str], delays: list[int]) -> tuple[list[int], int, bool]:
    """Returns the characters shown after each delta and in the end, and whether the answer was halted. `delays` selects
    the deltas after which the service is slow, so that text accumulates."""
    answers, service, outgoing, shown = PrefilteredAnswers(), Service(rules), Outgoing(), 0
    announced = answer_prefilter(rules)
    answers.prefilter = Prefilter.from_policy(PolicyState(answer_prefilter=announced)) if announced else None
    history: list[int] = []
    late = deque(delays)

    def exchange() -> None:
        nonlocal outgoing, shown
        response = service.answer(outgoing)
        outgoing = Outgoing()
        answers.note(response)
        assert service.screener is not None
        shown = max(shown, service.screener.num_clear_chars)

    for delta in deltas:
        known = answers.take([SLOT], [delta], [], outgoing)
        if known is not None:
            shown = max(shown, *known.num_clear_chars)
        if outgoing and not (late and late.popleft() % 3 == 0):
            exchange()
        history.append(shown)
        if service.screener is not None and service.screener.hit is not None:
            break
    known = answers.take([], [], [SLOT], outgoing)
    if known is None or SLOT not in known.closed_slots:
        exchange()
    is_halted = service.screener is not None and service.screener.hit is not None
    return history, shown if is_halted else sum(map(len, deltas)), is_halted


def screen_fully(rules: RuleSet, deltas: list[str]) -> tuple[list[int], int, bool]:
    screener = AnswerScreener(rules)
    history: list[int] = []
    for delta in deltas:
        screener.push(delta)
        history.append(screener.num_clear_chars)
        if screener.hit is not None:
            break
    if screener.hit is None:
        screener.close()
    return history, screener.num_clear_chars, screener.hit is not None


@settings(max_examples=num_examples(400), deadline=None)
@given(rule_sets(), deltas_of)
@example(RuleSet([Phrase(RULE, "a b", True)], []), ["xa", "  ", "b"])
@example(RuleSet([Phrase(RULE, "ab", True)], []), ["x", "ab", " "])
@example(RuleSet([Phrase(RULE, "fi", False)], []), ["x", "ﬁ"])
@example(RuleSet([Phrase(RULE, "a b", True)], []), ["a", "\\", "nb"])
@example(RuleSet([Phrase(RULE, "ab", True)], []), ["x\\", "n", "ab", " "])
@example(RuleSet([Phrase(RULE, "lb", True, is_look_alike=True)], []), ["x ", "1", "b", " "])
@example(RuleSet([Phrase(RULE, "na", False, is_look_alike=True)], []), ["x", "m", "a"])
@example(RuleSet([Phrase(RULE, "abc", True, is_spaced=True)], []), ["x", "A-", "- b", ".", "c "])
@example(RuleSet([Phrase(RULE, "rnl", True, is_look_alike=True, is_spaced=True)], []), ["x ", "M", " -1", " "])
def test_a_prefiltered_answer_is_shown_exactly_as_a_screened_one(rules: RuleSet, deltas: list[str]):
    """After every delta the same characters are clear, and the same answers are halted at the same place."""
    assert screen(rules, deltas, []) == screen_fully(rules, deltas)


@settings(max_examples=num_examples(300), deadline=None)
@given(rule_sets(only_words=True), deltas_of)
@example(RuleSet([Phrase(RULE, each, True) for each in ("abc", "bc", "c", "fi-")], []), ["xab", "c", " a", "bc "])
@example(RuleSet([Phrase(RULE, each, True) for each in ("abc", "-bc", "c", "b c")], []), ["a-", "bc", "b\\n", "c"])
@example(RuleSet([Phrase(RULE, "ab", True, is_spaced=True)], []), ["_", "a", "_b", "c"])
def test_words_are_prefiltered_as_exactly(rules: RuleSet, deltas: list[str]):
    """Where all phrases are whole words, the middle of a word is no beginning of one."""
    assert screen(rules, deltas, []) == screen_fully(rules, deltas)


@settings(max_examples=num_examples(300), deadline=None)
@given(rule_sets(), deltas_of, st.lists(st.integers(0, 2), max_size=10))
def test_a_slow_service_changes_nothing_either(rules: RuleSet, deltas: list[str], delays: list[int]):
    """While a verdict is outstanding no text is skipped, and the same answers are halted. Accumulated text is judged at
    once: a possible earlier hit has then turned out not to be one, so more may be shown, but never less."""
    history, shown, is_halted = screen(rules, deltas, delays)
    full_history, fully_shown, is_fully_halted = screen_fully(rules, deltas)
    assert is_halted == is_fully_halted
    assert shown >= fully_shown
    assert is_halted or shown == fully_shown
    assert max(history, default=0) <= shown
    for slow, at_once in itertools.zip_longest(history[: len(full_history)], full_history):
        assert is_halted or slow <= at_once


def test_a_long_deny_list_has_shorter_beginnings():
    """The prefilter's size is bounded however long the list is."""
    phrases = [Phrase(RULE, f"{i:05}"[::-1], True) for i in range(10_000)]
    announced = answer_prefilter(RuleSet([Phrase(RULE, "zebra", True), *phrases], []))
    assert announced is not None
    assert MAX_BEGINNINGS // 64 < len(announced.folded_beginnings) <= MAX_BEGINNINGS
    assert any("zebra".startswith(beginning) for beginning in announced.folded_beginnings)


def test_most_words_pass():
    """A token that ends with the first letter of a phrase is not sent, unless the letter begins a word."""
    phrases = [Phrase(RULE, text, True) for text in ("north wind", "ration card", "$100")]
    filtered = Prefilter.from_policy(PolicyState(answer_prefilter=answer_prefilter(RuleSet(phrases, []))))
    assert filtered is not None
    for token in (" station", " operation", " her", " cannot", " 9", "on", " nation"):
        assert not filtered.is_suspicious(token)
    for token in (" n", "r", " (nor", " rat", " a$", " Norton"):
        assert filtered.is_suspicious(token)


def test_a_pattern_that_can_begin_anywhere_rules_the_prefilter_out():
    """The beginnings of its matches are unknown."""
    assert answer_prefilter(RuleSet([], [Pattern(RULE, re2.compile("[0-9]{3}"), (), 3)])) is None
