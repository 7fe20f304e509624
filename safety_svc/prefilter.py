"""Prefilters: the part of the rules that routers know, so that they need not send text in which no match can begin."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from kvloom.v1.safety_service_pb2 import Prefilter
from kvloom_common.text.json_escapes import ESCAPE
from safety_svc.look_alikes import ascii_look_alikes
from safety_svc.policy import Pattern, Phrase, RuleSet

MAX_BEGINNINGS: Final = 1024
MAX_ANSWER_CHARS: Final = 4
"""The maximum length of a beginning for which answers are searched."""
MAX_PROMPT_CHARS: Final = 16
"""The maximum length of a beginning for which prompts are searched. The longer it is, the fewer prompts contain it by
chance. Unlike in an answer, no text of a prompt is withheld because of its first characters."""


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
        self._phrases = {phrase.text for phrase in rules.phrases if not phrase.is_look_alike}
        self._look_alikes = {phrase.text for phrase in rules.phrases if phrase.is_look_alike}

    def prefilter(self, beginnings: set[str], num_chars: int) -> Prefilter | None:
        """Return the prefilter with these beginnings of patterns, and those of phrases with so many characters; None
        if there are too many."""
        folded = _ascii_beginnings(self._phrases, num_chars)
        look_alikes = _ascii_beginnings(self._look_alikes, num_chars)
        if len(beginnings) + len(folded) + len(look_alikes) > MAX_BEGINNINGS:
            return None
        return Prefilter(
            beginnings=sorted(beginnings),
            folded_beginnings=sorted(folded),
            look_alike_beginnings=sorted(look_alikes),
            look_alikes=ascii_look_alikes() if self._look_alikes else {},
        )


def _ascii_beginnings(texts: set[str], num_chars: int) -> set[str]:
    """Omit texts whose first character is outside ASCII: routers send all text with such characters anyway."""
    return {text[:num_chars] for text in texts if text[0].isascii()}
