"""Screening: pure functions of a rule set and a text.

A prompt is judged as a whole. An answer is judged while it streams: `AnswerScreener` reports how many characters are
clear, and withholds only text that may turn out to be the beginning of something forbidden.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from kvloom_common.text.json_escapes import ESCAPE, pieces
from safety_svc.pattern_scan import PatternScan
from safety_svc.phrase_scan import PhraseScan
from safety_svc.policy import Hit, RuleSet, worst
from safety_svc.rule_modes import HOLDING, WATCHING, Judge, Mode, Scope


class EscapedScan:
    """Searches as `PhraseScan` does. At most 11 characters of an escape that is not complete are withheld, too."""

    __slots__ = ("_cut", "_first", "_offsets", "_phrases", "_total", "num_clear")

    def __init__(self, phrases: PhraseScan) -> None:
        """`phrases` has searched the text so far, in which there was no escape."""
        self._phrases = phrases.copy()
        self._total = phrases.num_chars
        self._first = phrases.num_clear
        """How many characters JSON reads before those of `_offsets`."""
        self._offsets = list(range(phrases.num_clear, phrases.num_chars))
        """For each character that JSON reads and that is withheld, its offset in the text."""
        self._cut = ""
        """The beginning of an escape at the end of the text so far."""
        self.num_clear = phrases.num_clear
        """The number of characters, from the beginning of the text, that are not part of a phrase."""

    def push(self, delta: str, *, is_end: bool) -> Hit | None:
        """Search the next characters. Returns the first phrase that is found."""
        text, base = self._cut + delta, self._total - len(self._cut)
        self._total += len(delta)
        read: list[str] = []
        end = 0
        for piece in pieces(text, is_end=is_end):
            read.append(piece.read)
            at = base + piece.start
            self._offsets += [at] if piece.is_escape else range(at, at + len(piece.read))
            end = piece.end
        self._cut = text[end:]
        hit = self._phrases.push("".join(read), is_end=is_end)
        if hit is not None:
            hit = Hit(hit.rule, self._offsets[hit.start - self._first])
        num_read_clear = self._phrases.num_clear - self._first
        withheld = self._offsets[num_read_clear:]
        self.num_clear = withheld[0] if withheld else self._total - len(self._cut)
        self._first, self._offsets = self._phrases.num_clear, withheld
        return hit

    def skip(self, num_chars: int, last_char: str) -> None:
        """Account for text that is known to be clear. The text before it must be clear, too."""
        self._phrases.skip(num_chars, last_char)
        self._total += num_chars
        self._first += num_chars
        self.num_clear = self._total


CHARS_PER_SLICE: Final = 8_192
"""A prompt up to this length is checked at once. A longer one is searched in slices of this length, which take about a
millisecond at worst. Between them, the event loop serves answers."""


def is_long(prompt: str) -> bool:
    """True when `check_long_prompt` should check the prompt."""
    return len(prompt) > CHARS_PER_SLICE


def check_prompt(rules: RuleSet, text: str, judge: Judge | None = None) -> Hit | None:
    """Return the first forbidden text in a whole prompt. `judge` says which rules count; None: all."""
    hits = [scan.push(text, is_end=True) for scan in _phrase_scans(rules, text, judge)]
    return worst([*hits, _find_pattern(rules, text, judge)])


async def check_long_prompt(rules: RuleSet, text: str, judge: Judge | None = None) -> Hit | None:
    """Do the same as `check_prompt` without blocking the event loop."""
    hits = [await asyncio.to_thread(_find_pattern, rules, text, judge)]
    hits += [await _find_phrase_in_slices(scan, text) for scan in _phrase_scans(rules, text, judge)]
    return worst(hits)


def _phrase_scans(rules: RuleSet, text: str, judge: Judge | None) -> list[PhraseScan | EscapedScan]:
    scans = [PhraseScan(phrases, judge) for phrases in rules.phrase_sets]
    return [*scans, *map(EscapedScan, scans)] if ESCAPE in text else [*scans]


def _find_pattern(rules: RuleSet, text: str, judge: Judge | None) -> Hit | None:
    return PatternScan(rules, judge).push(text, is_end=True) if rules.patterns else None


async def _find_phrase_in_slices(scan: PhraseScan | EscapedScan, text: str) -> Hit | None:
    for start in range(0, len(text), CHARS_PER_SLICE):
        hit = scan.push(text[start : start + CHARS_PER_SLICE], is_end=False)
        if hit is not None:
            return hit
        await asyncio.sleep(0)
    return scan.push("", is_end=True)


Scan = PhraseScan | PatternScan | EscapedScan


def _scans(rules: RuleSet, judge: Judge | None) -> list[Scan]:
    scans: list[Scan] = [PhraseScan(phrases, judge) for phrases in rules.phrase_sets]
    return [*scans, PatternScan(rules, judge)] if rules.patterns else scans


class AnswerScreener:
    """Screens one answer. After each `push`, the first `num_clear_chars` characters of the answer may be shown. Once
    `hit` is set, nothing after them may be shown, and the caller must not push more text."""

    __slots__ = (
        "_num_chars",
        "_num_told",
        "_reads_escapes",
        "_scans",
        "_watchers",
        "flagged",
        "hit",
        "num_clear_chars",
    )

    def __init__(self, rules: RuleSet, watched: RuleSet | None = None, scope: Scope | None = None) -> None:
        """`rules` withhold text, and those of `watched` do not. `scope` says which of them hold; None: all `rules`."""
        self.flagged: dict[str, Mode] = {}
        """The names and modes of rules that only note what they find, and have found something."""
        self._scans = _scans(rules, None if scope is None else Judge(scope, HOLDING, self.flagged))
        self._watchers: list[Scan] = []
        if scope is not None and watched:
            self._watchers = _scans(watched, Judge(scope, WATCHING, self.flagged))
        self._reads_escapes = False
        self._num_told = 0
        self._num_chars = 0
        self.num_clear_chars = 0
        self.hit: Hit | None = None

    def push(self, delta: str) -> None:
        """Judge the next characters."""
        self._judge(delta, is_end=False)

    def new_flags(self) -> Sequence[tuple[str, Mode]]:
        """Return the names and modes of rules that have noted something for the first time since the last call."""
        if len(self.flagged) == self._num_told:
            return ()
        new = list(self.flagged.items())[self._num_told :]
        self._num_told += len(new)
        return new

    @property
    def is_clear(self) -> bool:
        """True while no text is withheld."""
        return self.num_clear_chars == self._num_chars

    def skip(self, num_chars: int, last_char: str) -> None:
        """Account for text that contains nothing forbidden and no beginning of it. `is_clear` must be true before."""
        self._num_chars += num_chars
        self.num_clear_chars = self._num_chars
        for scan in (*self._scans, *self._watchers):
            scan.skip(num_chars, last_char)

    def close(self) -> None:
        """Judge withheld text as it stands, because the answer is complete."""
        self._judge("", is_end=True)

    def _judge(self, delta: str, *, is_end: bool) -> None:
        if ESCAPE in delta and not self._reads_escapes:
            self._reads_escapes = True
            for scans in (self._scans, self._watchers):
                scans += [EscapedScan(scan) for scan in scans if isinstance(scan, PhraseScan)]
        self._num_chars += len(delta)
        num_clear = self._num_chars
        hit: Hit | None = None
        for scan in self._scans:
            found = scan.push(delta, is_end=is_end)
            num_clear = min(num_clear, scan.num_clear)
            if found is not None:
                hit = worst((hit, found))
        for scan in self._watchers:
            found = scan.push(delta, is_end=is_end)
            if found is not None:
                hit = worst((hit, found))
        if hit is not None:
            # Text that another rule still withholds must not be shown either: it might have become an earlier hit.
            num_clear = min(num_clear, hit.start)
            self.hit = hit
        self.num_clear_chars = max(self.num_clear_chars, num_clear)
