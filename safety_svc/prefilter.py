"""Prefilters: the part of the rules that routers know, so that they need not send text in which no match can begin."""

from __future__ import annotations

from typing import Final

from kvloom.v1.safety_service_pb2 import Prefilter
from safety_svc.policy import RuleSet

MAX_BEGINNINGS: Final = 1024
MAX_ANSWER_CHARS: Final = 4
"""The maximum length of a beginning for which answers are searched."""
MAX_PROMPT_CHARS: Final = 16
"""The maximum length of a beginning for which prompts are searched. The longer it is, the fewer prompts contain it by
chance. Unlike in an answer, no text of a prompt is withheld because of its first characters."""


def answer_prefilter(rules: RuleSet) -> Prefilter | None:
    """Return the prefilter for answers, or None when a match can begin with any text.

    Beginnings are as long as possible without exceeding MAX_BEGINNINGS. Length 1 always suffices: only ASCII beginnings
    matter, and there are 128 ASCII characters.
    """
    if not _all_have_prefixes(rules):
        return None
    prefixes, phrases = _beginnings_of(rules)
    for num_chars in range(MAX_ANSWER_CHARS, 0, -1):
        beginnings = _ascii_beginnings(prefixes, num_chars)
        folded = _ascii_beginnings(phrases, num_chars)
        if len(beginnings) + len(folded) <= MAX_BEGINNINGS:
            return Prefilter(beginnings=sorted(beginnings), folded_beginnings=sorted(folded))
    return None


def prompt_prefilter(rules: RuleSet) -> Prefilter | None:
    """Return the prefilter for prompts, or None when a match can begin with any text or with too many different texts.

    `any_text` requires that there are no phrases: text that folds to a phrase may be written with characters outside
    ASCII. Patterns, in contrast, are compared with the text as written.
    """
    if not _all_have_prefixes(rules):
        return None
    prefixes, phrases = _beginnings_of(rules)
    for num_chars in range(MAX_PROMPT_CHARS, 0, -1):
        beginnings = {prefix[:num_chars] for prefix in prefixes}
        folded = _ascii_beginnings(phrases, num_chars)
        if len(beginnings) + len(folded) <= MAX_BEGINNINGS:
            return Prefilter(beginnings=sorted(beginnings), folded_beginnings=sorted(folded), any_text=not phrases)
    return None


def _all_have_prefixes(rules: RuleSet) -> bool:
    return all(pattern.prefixes for pattern in rules.patterns)


def _beginnings_of(rules: RuleSet) -> tuple[set[str], set[str]]:
    """Return (beginnings of patterns, beginnings of phrases)."""
    prefixes = {prefix for pattern in rules.patterns for prefix in pattern.prefixes}
    return prefixes, {phrase.text for phrase in rules.phrases}


def _ascii_beginnings(texts: set[str], num_chars: int) -> set[str]:
    """Omit texts whose first character is outside ASCII: routers send all text with such characters anyway."""
    return {text[:num_chars] for text in texts if text[0].isascii()}
