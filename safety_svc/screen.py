"""Screening: pure functions of a rule set and text.

A prompt is judged whole. An answer is judged as it streams: `AnswerScreener` says how many characters are clear, and
holds back only what may turn out to be the beginning of something forbidden.
"""

from __future__ import annotations

import asyncio
from typing import Final

from safety_svc.pattern_scan import PatternScan
from safety_svc.phrase_scan import PhraseScan
from safety_svc.policy import Hit, RuleSet

CHARS_PER_TURN: Final = 8_192
"""So much of a long prompt is searched at a time (about a millisecond at worst), then answers have their turn."""


def check_prompt(rules: RuleSet, text: str) -> Hit | None:
    """The first forbidden thing in a whole text."""
    hits = (
        PhraseScan(rules).push(text, is_end=True) if rules.automaton is not None else None,
        _find_pattern(rules, text),
    )
    return min((hit for hit in hits if hit is not None), key=lambda hit: hit.start, default=None)


async def check_long_prompt(rules: RuleSet, text: str) -> Hit | None:
    """As `check_prompt`, without keeping the event loop."""
    hits = [await asyncio.to_thread(_find_pattern, rules, text), await _find_phrase_in_turns(rules, text)]
    return min((hit for hit in hits if hit is not None), key=lambda hit: hit.start, default=None)


def _find_pattern(rules: RuleSet, text: str) -> Hit | None:
    return PatternScan(rules).push(text, is_end=True) if rules.patterns else None


async def _find_phrase_in_turns(rules: RuleSet, text: str) -> Hit | None:
    if rules.automaton is None:
        return None
    scan = PhraseScan(rules)
    for start in range(0, len(text), CHARS_PER_TURN):
        hit = scan.push(text[start : start + CHARS_PER_TURN], is_end=False)
        if hit is not None:
            return hit
        await asyncio.sleep(0)
    return scan.push("", is_end=True)


class AnswerScreener:
    """One answer. After each `push`, `num_clear_chars` characters of the answer may be shown; once `hit` is set, what
    lies behind them may not, and nothing more is to be pushed."""

    __slots__ = ("_num_chars", "_patterns", "_phrases", "hit", "num_clear_chars")

    def __init__(self, rules: RuleSet) -> None:
        self._phrases = PhraseScan(rules) if rules.automaton is not None else None
        self._patterns = PatternScan(rules) if rules.patterns else None
        self._num_chars = 0
        self.num_clear_chars = 0
        self.hit: Hit | None = None

    def push(self, delta: str) -> None:
        """Take in the next characters."""
        self._judge(delta, is_end=False)

    @property
    def is_clear(self) -> bool:
        """Nothing is held back."""
        return self.num_clear_chars == self._num_chars

    def skip(self, num_chars: int, last_char: str) -> None:
        """Text went by that cannot hold anything forbidden, nor its beginning; `is_clear` was true before it."""
        self._num_chars += num_chars
        self.num_clear_chars = self._num_chars
        for scan in (self._phrases, self._patterns):
            if scan is not None:
                scan.skip(num_chars, last_char)

    def close(self) -> None:
        """The answer is complete: what was held back is judged as it stands."""
        self._judge("", is_end=True)

    def _judge(self, delta: str, *, is_end: bool) -> None:
        self._num_chars += len(delta)
        num_clear = self._num_chars
        hit: Hit | None = None
        for scan in (self._phrases, self._patterns):
            if scan is not None:
                found = scan.push(delta, is_end=is_end)
                num_clear = min(num_clear, scan.num_clear)
                if found is not None and (hit is None or found.start < hit.start):
                    hit = found
        if hit is not None:
            # What another rule still holds stays unseen too: it might have been an earlier hit.
            num_clear = min(num_clear, hit.start)
            self.hit = hit
        self.num_clear_chars = max(self.num_clear_chars, num_clear)
