"""Names the categories of all rules that a text breaks. Nothing is blocked.

Unlike screening, which ends at the first forbidden passage, this searches a whole text for every rule.
"""

from __future__ import annotations

import asyncio

from kvloom_common.text.json_escapes import ESCAPE, unescaped
from safety_svc.folding import SPACE
from safety_svc.phrase_scan import is_whole
from safety_svc.policy import PhraseSet, RuleSet, SafetyPolicy
from safety_svc.screen import CHARS_PER_SLICE


async def broken_categories(policy: SafetyPolicy, text: str) -> set[str]:
    """Search without blocking the event loop for longer than a slice of the text takes. Raises RuleFailedError."""
    rules = policy.any_text
    found: set[str] = set()
    for phrases in rules.phrase_sets:
        found |= await _phrase_categories(phrases, text)
        if ESCAPE in text:
            found |= await _phrase_categories(phrases, unescaped(text))
    if not rules.patterns:
        return found
    if len(text) <= CHARS_PER_SLICE:
        return found | _pattern_categories(rules, text)
    return found | await asyncio.to_thread(_pattern_categories, rules, text)


def _pattern_categories(rules: RuleSet, text: str) -> set[str]:
    return {pattern.rule.category for pattern in rules.patterns if pattern.expression.search(text) is not None}


async def _phrase_categories(phrases: PhraseSet, text: str) -> set[str]:
    pieces: list[str] = []
    for start in range(0, len(text), CHARS_PER_SLICE):
        after_space = bool(pieces) and pieces[-1].endswith(SPACE)
        folded, _ = phrases.fold(text[start : start + CHARS_PER_SLICE], after_space=after_space)
        if folded:
            pieces.append(folded)
        if start:
            await asyncio.sleep(0)
    folded = "".join(pieces)
    found: set[str] = set()
    for start in range(0, len(folded), CHARS_PER_SLICE):
        begin = max(0, start - phrases.max_length)  # a phrase may lie across two slices
        for end, ending in phrases.automaton.iter(folded, begin, min(len(folded), start + CHARS_PER_SLICE)):
            for phrase in ending:
                first = end + 1 - len(phrase.text)
                if not phrase.whole_words or is_whole(folded, first, end + 1, is_end=True):
                    found.add(phrase.rule.category)
        if start:
            await asyncio.sleep(0)
    return found
