"""Screening: pure functions of a rule set and text.

A prompt is judged whole. An answer is judged as it streams: `AnswerScreener` says how many characters are clear, and
holds back only what may turn out to be the beginning of something forbidden.
"""

from __future__ import annotations

import dataclasses

from safety_svc.folding import SPACE, fold
from safety_svc.policy import Pattern, Rule, RuleSet


@dataclasses.dataclass(frozen=True, slots=True)
class Hit:
    """Something forbidden. `start` is its first character, counted from the beginning of the text."""

    rule: Rule
    start: int


def check_prompt(rules: RuleSet, text: str) -> Hit | None:
    """The first forbidden thing in a whole text."""
    screener = AnswerScreener(rules)
    screener.push(text)
    screener.close()
    return screener.hit


class AnswerScreener:
    """One answer. After each `push`, `num_clear_chars` characters of the answer may be shown; once `hit` is set, what
    lies behind them may not, and nothing more is to be pushed."""

    __slots__ = ("_patterns", "_phrases", "hit", "num_clear_chars")

    def __init__(self, rules: RuleSet) -> None:
        self._phrases = _PhraseScan(rules) if rules.automaton is not None else None
        self._patterns = _PatternScan(rules) if rules.patterns else None
        self.num_clear_chars = 0
        self.hit: Hit | None = None

    def push(self, delta: str) -> None:
        """Take in the next characters."""
        self._judge(delta, is_end=False)

    def close(self) -> None:
        """The answer is complete: what was held back is judged as it stands."""
        self._judge("", is_end=True)

    def _judge(self, delta: str, *, is_end: bool) -> None:
        hits: list[Hit] = []
        clear: list[int] = []
        for scan in (self._phrases, self._patterns):
            if scan is not None:
                hit = scan.push(delta, is_end=is_end)
                clear.append(scan.num_clear)
                if hit is not None:
                    hits.append(hit)
        if hits:
            self.hit = min(hits, key=lambda hit: hit.start)
            # What one scan still holds may be shown: its rule was not broken. But never what was found.
            self.num_clear_chars = max(self.num_clear_chars, min([self.hit.start, *clear]))
        else:
            self.num_clear_chars = min(clear)


class _PhraseScan:
    """Deny lists, over folded text.

    A phrase that ends in new text begins at or behind the earliest position from which the text so far could still
    become a phrase. Only the text from there on (and one character before it, for word boundaries) is kept.
    """

    __slots__ = ("_offsets", "_rules", "_start", "_text", "_total", "num_clear")

    def __init__(self, rules: RuleSet) -> None:
        self._rules = rules
        self._text = ""
        self._offsets: list[int] = []
        """Where each kept folded character came from, counted from the beginning of the answer."""
        self._start = 0
        """From here on the kept text may still become a phrase; before it lies one character at most."""
        self._total = 0
        self.num_clear = 0

    def push(self, delta: str, *, is_end: bool) -> Hit | None:
        folded, offsets = fold(delta, after_space=self._text.endswith(SPACE))
        self._text += folded
        self._offsets += [self._total + offset for offset in offsets]
        self._total += len(delta)
        hit = self._find(is_end=is_end)
        self._advance(is_end=is_end)
        return hit

    def _find(self, *, is_end: bool) -> Hit | None:
        text, found = self._text, None
        for end, phrases in self._rules.automaton.iter(text, self._start):
            for phrase in phrases:
                start = end + 1 - len(phrase.text)
                if phrase.whole_words and not _is_whole(text, start, end + 1, is_end=is_end):
                    continue
                if found is None or start < found[0]:
                    found = (start, phrase.rule)
        return None if found is None else Hit(found[1], self._offsets[found[0]])

    def _advance(self, *, is_end: bool) -> None:
        text, start, automaton = self._text, self._start, self._rules.automaton
        first_characters = self._rules.first_characters
        while start < len(text) and (
            is_end or text[start] not in first_characters or not automaton.match(text[start:])
        ):
            start += 1
        self.num_clear = self._offsets[start] if start < len(text) else self._total
        kept_from = max(0, start - 1)
        self._text, self._offsets = text[kept_from:], self._offsets[kept_from:]
        self._start = start - kept_from


class _PatternScan:
    """Patterns, over the text as it is: kept as far back as a match that ends in new text can begin."""

    __slots__ = ("_rules", "_text", "_total", "num_clear")

    def __init__(self, rules: RuleSet) -> None:
        self._rules = rules
        self._text = ""
        self._total = 0
        self.num_clear = 0

    def push(self, delta: str, *, is_end: bool) -> Hit | None:
        self._text += delta
        self._total += len(delta)
        base = self._total - len(self._text)
        hit = self._find(base)
        start = len(self._text) if is_end else self._earliest_start()
        self.num_clear = base + start
        self._text = self._text[start:]
        return hit

    def _find(self, base: int) -> Hit | None:
        hits: list[Hit] = []
        prefix_starts = [match.start() for match in self._rules.prefix.finditer(self._text)]
        for pattern in self._rules.patterns:
            start = self._first_match(pattern, prefix_starts)
            if start is not None:
                hits.append(Hit(pattern.rule, base + start))
        return min(hits, key=lambda hit: hit.start, default=None)

    def _first_match(self, pattern: Pattern, prefix_starts: list[int]) -> int | None:
        if pattern.prefixes and not prefix_starts:
            return None
        match = pattern.expression.search(self._text)
        return None if match is None else match.start()

    def _earliest_start(self) -> int:
        """Where the earliest match could begin that is not complete yet."""
        text, rules = self._text, self._rules
        candidates = [len(text)]
        if rules.unanchored_length:
            candidates.append(max(0, len(text) - rules.unanchored_length + 1))
        partial = rules.prefix_end.search(text)
        if partial is not None:
            candidates.append(partial.start())
        for match in rules.prefix.finditer(text):
            start = match.start()
            reach = max(pattern.max_length for pattern in rules.patterns if pattern.may_begin(text, start))
            if len(text) - start < reach:
                candidates.append(start)
                break
        return min(candidates)


def _is_whole(text: str, start: int, end: int, *, is_end: bool) -> bool:
    """Whether text[start:end] stands between word boundaries; at the end of an unfinished text that is not known."""
    if start > 0 and _is_word(text[start - 1]) and _is_word(text[start]):
        return False
    if end == len(text):
        return is_end or not _is_word(text[end - 1])
    return not (_is_word(text[end]) and _is_word(text[end - 1]))


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"
