"""What routers are told of the rules, so that they need not send text in which nothing can begin."""

from __future__ import annotations

from typing import Final

from kvloom.v1.safety_service_pb2 import Prefilter
from safety_svc.policy import RuleSet

MAX_BEGINNINGS: Final = 1024
MAX_CHARS: Final = 4
MAX_PROMPT_CHARS: Final = 16
"""Of a beginning that prompts are searched for: the longer, the fewer prompts have it by chance. Nothing is held back
there for the sake of its first characters."""


def prefilter(rules: RuleSet) -> Prefilter | None:
    """For answers. None when a match can begin with anything. Beginnings are as long as they may be without becoming
    too many; there are only 128 that are one ASCII character long, and no others matter."""
    if not _all_have_prefixes(rules):
        return None
    prefixes, phrases = _beginnings_of(rules)
    for num_chars in range(MAX_CHARS, 0, -1):
        beginnings = _ascii_beginnings(prefixes, num_chars)
        folded = _ascii_beginnings(phrases, num_chars)
        if len(beginnings) + len(folded) <= MAX_BEGINNINGS:
            return Prefilter(beginnings=sorted(beginnings), folded_beginnings=sorted(folded))
    return None


def prompt_prefilter(rules: RuleSet) -> Prefilter | None:
    """For prompts. None when a match can begin with anything, or with too much. What looks like a phrase may have been
    written with characters outside ASCII; patterns see the text as it is."""
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
    """(of patterns, of phrases)"""
    prefixes = {prefix for pattern in rules.patterns for prefix in pattern.prefixes}
    return prefixes, {phrase.text for phrase in rules.phrases}


def _ascii_beginnings(texts: set[str], num_chars: int) -> set[str]:
    """What begins outside ASCII is found without them."""
    return {text[:num_chars] for text in texts if text[0].isascii()}
