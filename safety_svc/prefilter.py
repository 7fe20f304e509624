"""Prefilters: the part of the rules that routers know, so that they need not send text in which no match can begin."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from kvloom.v1.safety_service_pb2 import PolicyState, Prefilter
from kvloom_common.text.json_escapes import ESCAPE
from safety_svc.look_alikes import ascii_look_alikes
from safety_svc.policy import Pattern, Phrase, RuleSet, SafetyPolicy

MAX_BEGINNINGS: Final = 1024
MAX_ANSWER_CHARS: Final = 4
"""The maximum length of a beginning for which answers are searched."""
MAX_PROMPT_CHARS: Final = 16
"""The maximum length of a beginning for which prompts are searched. The longer it is, the fewer prompts contain it by
chance. Unlike in an answer, no text of a prompt is withheld because of its first characters."""


def policy_state(policy: SafetyPolicy) -> PolicyState:
    """Return what routers are told of a policy. For long lists this takes a while."""
    return PolicyState(
        revision=policy.revision,
        screens_prompts=bool(policy.prompt or policy.guardrails),
        screens_answers=bool(policy.answer or policy.watched_answer or policy.answer_guardrails),
        answer_prefilter=None if policy.answer_guardrails else answer_prefilter(policy.answer, policy.watched_answer),
        prompt_prefilter=None if policy.guardrails else prompt_prefilter(policy.prompt),
    )


def answer_prefilter(*rule_sets: RuleSet) -> Prefilter | None:
    """Return the prefilter for answers, or None when a match can begin with any text.

    Beginnings are as long as possible without exceeding MAX_BEGINNINGS. Length 1 always suffices: only ASCII beginnings
    matter, and there are 128 ASCII characters.
    """
    rules = _together(rule_sets)
    if not _all_have_prefixes(rules):
        return None
    texts = _Texts(rules)
    for num_chars in range(MAX_ANSWER_CHARS, 0, -1):
        found = texts.prefilter(_ascii_beginnings(texts.prefixes, num_chars), num_chars)
        if found is not None:
            found.at_word_beginnings = all(phrase.whole_words for phrase in rules.phrases)
            if rules.phrases:
                found.beginnings.append(ESCAPE)
            return found
    return None


def prompt_prefilter(rules: RuleSet) -> Prefilter | None:
    """Return the prefilter for prompts, or None when a match can begin with any text or with too many different texts.

    `any_text` requires that there are no phrases: text that folds to a phrase may be written with characters outside
    ASCII. Patterns, in contrast, are compared with the text as written.
    """
    if not _all_have_prefixes(rules):
        return None
    texts = _Texts(rules)
    for num_chars in range(MAX_PROMPT_CHARS, 0, -1):
        found = texts.prefilter({prefix[:num_chars] for prefix in texts.prefixes}, num_chars)
        if found is not None:
            found.any_text, found.reads_escapes = not rules.phrases, bool(rules.phrases)
            return found
    return None


class _Rules(NamedTuple):
    """The rules of several sets."""

    phrases: Sequence[Phrase]
    patterns: Sequence[Pattern]


def _together(rule_sets: Iterable[RuleSet]) -> _Rules:
    phrases: dict[Phrase, None] = {}
    patterns: list[Pattern] = []
    for rules in rule_sets:
        phrases |= dict.fromkeys(rules.phrases)
        patterns += rules.patterns
    return _Rules(list(phrases), patterns)


def _all_have_prefixes(rules: RuleSet | _Rules) -> bool:
    return all(pattern.prefixes for pattern in rules.patterns)


class _Texts:
    """The texts with which matches begin, by how they are compared."""

    def __init__(self, rules: RuleSet | _Rules) -> None:
        self.prefixes = {prefix for pattern in rules.patterns for prefix in pattern.prefixes}
        self._phrases, self._look_alikes = _by_look(rules, is_spaced=False)
        self._spaced, self._spaced_look_alikes = _by_look(rules, is_spaced=True)

    def prefilter(self, beginnings: set[str], num_chars: int) -> Prefilter | None:
        """Return the prefilter with these beginnings of patterns, and those of phrases with so many characters; None
        if there are too many."""
        folded = _ascii_beginnings(self._phrases, num_chars)
        look_alikes = _ascii_beginnings(self._look_alikes, num_chars)
        num_letters = min(num_chars, MAX_ANSWER_CHARS)  # hardly any text has these by chance
        spaced = _ascii_beginnings(self._spaced, num_letters)
        spaced_look_alikes = _ascii_beginnings(self._spaced_look_alikes, num_letters)
        if sum(map(len, (beginnings, folded, look_alikes, spaced, spaced_look_alikes))) > MAX_BEGINNINGS:
            return None
        return Prefilter(
            beginnings=sorted(beginnings),
            folded_beginnings=sorted(folded),
            look_alike_beginnings=sorted(look_alikes),
            look_alikes=ascii_look_alikes() if look_alikes or spaced_look_alikes else {},
            spaced_beginnings=sorted(spaced),
            spaced_look_alike_beginnings=sorted(spaced_look_alikes),
        )


def _by_look(rules: RuleSet | _Rules, *, is_spaced: bool) -> tuple[set[str], set[str]]:
    """Return the phrases that are folded as they are, and those that are folded by their look."""
    phrases = [phrase for phrase in rules.phrases if phrase.is_spaced == is_spaced]
    looks = {phrase.text for phrase in phrases if phrase.is_look_alike}
    return {phrase.text for phrase in phrases if not phrase.is_look_alike}, looks


def _ascii_beginnings(texts: set[str], num_chars: int) -> set[str]:
    """Omit texts whose first character is outside ASCII: routers send all text with such characters anyway."""
    return {text[:num_chars] for text in texts if text[0].isascii()}
