"""Screening: pure functions of a rule set and a text.

A prompt is judged as a whole. An answer is judged while it streams: `AnswerScreener` reports how many characters are
clear, and withholds only text that may turn out to be the beginning of something forbidden.
"""

from __future__ import annotations

import asyncio
from typing import Final

from safety_svc.pattern_scan import PatternScan
from safety_svc.phrase_scan import PhraseScan
from safety_svc.policy import Hit, RuleSet, worst

CHARS_PER_SLICE: Final = 8_192
"""A prompt up to this length is checked at once. A longer one is searched in slices of this length, which take about a
millisecond at worst. Between them, the event loop serves answers."""


def is_long(prompt: str) -> bool:
    """True when `check_long_prompt` should check the prompt."""
    return len(prompt) > CHARS_PER_SLICE


def check_prompt(rules: RuleSet, text: str) -> Hit | None:
    """Return the first forbidden text in a whole prompt."""
    hits = (
        PhraseScan(rules).push(text, is_end=True) if rules.automaton is not None else None,
        _find_pattern(rules, text),
    )
    return worst(hits)


async def check_long_prompt(rules: RuleSet, text: str) -> Hit | None:
    """Do the same as `check_prompt` without blocking the event loop."""
    hits = [await asyncio.to_thread(_find_pattern, rules, text), await _find_phrase_in_slices(rules, text)]
    return worst(hits)


def _find_pattern(rules: RuleSet, text: str) -> Hit | None:
    return PatternScan(rules).push(text, is_end=True) if rules.patterns else None


async def _find_phrase_in_slices(rules: RuleSet, text: str) -> Hit | None:
    if rules.automaton is None:
        return None
    scan = PhraseScan(rules)
    for start in range(0, len(text), CHARS_PER_SLICE):
        hit = scan.push(text[start : start + CHARS_PER_SLICE], is_end=False)
        if hit is not None:
            return hit
        await asyncio.sleep(0)
    return scan.push("", is_end=True)


class AnswerScreener:
    """Screens one answer. After each `push`, the first `num_clear_chars` characters of the answer may be shown. Once
    `hit` is set, nothing after them may be shown, and the caller must not push more text."""

    __slots__ = ("_num_chars", "_patterns", "_phrases", "hit", "num_clear_chars")

    def __init__(self, rules: RuleSet) -> None:
        self._phrases = PhraseScan(rules) if rules.automaton is not None else None
        self._patterns = PatternScan(rules) if rules.patterns else None
        self._num_chars = 0
        self.num_clear_chars = 0
        self.hit: Hit | None = None

    def push(self, delta: str) -> None:
        """Judge the next characters."""
        self._judge(delta, is_end=False)

    @property
    def is_clear(self) -> bool:
        """True while no text is withheld."""
        return self.num_clear_chars == self._num_chars

    def skip(self, num_chars: int, last_char: str) -> None:
        """Account for text that contains nothing forbidden and no beginning of it. `is_clear` must be true before."""
        self._num_chars += num_chars
        self.num_clear_chars = self._num_chars
        for scan in (self._phrases, self._patterns):
            if scan is not None:
                scan.skip(num_chars, last_char)

    def close(self) -> None:
        """Judge withheld text as it stands, because the answer is complete."""
        self._judge("", is_end=True)

    def _judge(self, delta: str, *, is_end: bool) -> None:
        self._num_chars += len(delta)
        num_clear = self._num_chars
        hit: Hit | None = None
        for scan in (self._phrases, self._patterns):
            if scan is not None:
                found = scan.push(delta, is_end=is_end)
                num_clear = min(num_clear, scan.num_clear)
                hit = worst((hit, found))
        if hit is not None:
            # Text that another rule still withholds must not be shown either: it might have become an earlier hit.
            num_clear = min(num_clear, hit.start)
            self.hit = hit
        self.num_clear_chars = max(self.num_clear_chars, num_clear)
