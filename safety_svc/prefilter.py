"""What routers are told of the answer rules, so that they need not send text in which nothing can begin."""

from __future__ import annotations

from typing import Final

from kvloom.v1.safety_service_pb2 import Prefilter
from safety_svc.policy import RuleSet

MAX_BEGINNINGS: Final = 1024
MAX_CHARS: Final = 4


def prefilter(rules: RuleSet) -> Prefilter | None:
    """None when a match can begin with anything. Beginnings are as long as they may be without becoming too many; there
    are only 128 that are one ASCII character long, and no others matter."""
    if any(not pattern.prefixes for pattern in rules.patterns):
        return None
    prefixes = {prefix for pattern in rules.patterns for prefix in pattern.prefixes}
    phrases = {phrase.text for phrase in rules.phrases}
    for num_chars in range(MAX_CHARS, 0, -1):
        beginnings = _ascii_beginnings(prefixes, num_chars)
        folded = _ascii_beginnings(phrases, num_chars)
        if len(beginnings) + len(folded) <= MAX_BEGINNINGS:
            return Prefilter(beginnings=sorted(beginnings), folded_beginnings=sorted(folded))
    return None


def _ascii_beginnings(texts: set[str], num_chars: int) -> set[str]:
    """What begins outside ASCII is found without them."""
    return {text[:num_chars] for text in texts if text[0].isascii()}
