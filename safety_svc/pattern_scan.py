"""Patterns over a text that arrives in pieces."""

from __future__ import annotations

from safety_svc.policy import Hit, RuleSet


class PatternScan:
    """Searches the text as it is; kept, and held back, is what a match that is not complete yet can begin in, and one
    character before it, for assertions such as \\b.

    A match that touches the end of what has arrived is not final (the next character may make it longer, or a \\b
    false): it is still held and judged again with the next piece, unless it has reached its rule's max_length.
    """

    __slots__ = ("_rules", "_start", "_text", "_total", "num_clear")

    def __init__(self, rules: RuleSet) -> None:
        """`rules` has patterns."""
        self._rules = rules
        self._text = ""
        self._start = 0
        """Where the held text begins in the kept text: 0 or 1."""
        self._total = 0
        self.num_clear = 0
        """Characters, from the beginning of the text, that are no part of a match."""

    def push(self, delta: str, *, is_end: bool) -> Hit | None:
        """Takes in the next characters; the first match that is found."""
        self._total += len(delta)
        rules = self._rules
        is_clear = not rules.unanchored_length and self._start == len(self._text)
        if is_clear and rules.prefix_first_characters.isdisjoint(delta):  # nothing can begin here
            if delta:
                self._text, self._start = delta[-1], 1
            self.num_clear = self._total
            return None
        self._text += delta
        hit = self._find(is_end=is_end)
        end = len(self._text)
        start = end if is_end else self._earliest_start()
        self.num_clear = self._total - (end - start)
        kept_from = max(0, start - 1)
        self._text = self._text[kept_from:]
        self._start = start - kept_from
        return hit

    def skip(self, num_chars: int, last_char: str) -> None:
        """Text that is known to be clear went by, and the text before it was clear."""
        self._total += num_chars
        self._text, self._start = last_char, 1
        self.num_clear = self._total

    def _find(self, *, is_end: bool) -> Hit | None:
        text, end, base = self._text, len(self._text), self._total - len(self._text)
        hit: Hit | None = None
        has_prefix = self._rules.prefix.search(text, self._start) is not None
        for pattern in self._rules.patterns:
            if pattern.prefixes and not has_prefix:
                continue
            match = pattern.expression.search(text, self._start)
            if match is None:
                continue
            start = match.start()
            is_final = is_end or match.end() < end or end - start >= pattern.max_length
            if is_final and (hit is None or base + start < hit.start):
                hit = Hit(pattern.rule, base + start)
        return hit

    def _earliest_start(self) -> int:
        """Where the earliest match could begin that is not complete yet."""
        text, rules = self._text, self._rules
        earliest = len(text)
        if rules.unanchored_length:
            # Not one less, though a match lacks a character: what it lacks may be what an assertion looks at.
            earliest = max(self._start, len(text) - rules.unanchored_length)
        partial = rules.prefix_end.search(text, self._start)
        if partial is not None:
            earliest = min(earliest, partial.start())
        begin = max(self._start, len(text) - rules.max_prefixed_length)
        for match in rules.prefix.finditer(text, begin, earliest + rules.max_prefix_length):
            start = match.start()
            if len(text) - start <= rules.reach(text, start):
                return min(earliest, start)
        return earliest
