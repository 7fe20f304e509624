"""Names the categories of all rules that a text breaks. Nothing is blocked.

Unlike screening, which ends at the first forbidden passage, this searches a whole text for every rule.
"""

from __future__ import annotations

import asyncio

from kvloom_common.text.json_escapes import ESCAPE, unescaped
from safety_svc.phrase_scan import PhraseScan
from safety_svc.phrase_set import PhraseSet
from safety_svc.policy import RuleSet, SafetyPolicy
from safety_svc.rule_modes import Rule
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


class _Collector:
    """Collects the categories of all phrases that are found. None of them ends the search."""

    def __init__(self) -> None:
        self.categories: set[str] = set()

    def forbids(self, rule: Rule) -> bool:
        self.categories.add(rule.category)
        return False


async def _phrase_categories(phrases: PhraseSet, text: str) -> set[str]:
    found = _Collector()
    scan = PhraseScan(phrases, found)
    for start in range(0, len(text), CHARS_PER_SLICE):
        scan.push(text[start : start + CHARS_PER_SLICE], is_end=False)
        await asyncio.sleep(0)
    scan.push("", is_end=True)
    return found.categories
