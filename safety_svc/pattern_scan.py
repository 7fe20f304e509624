"""Searches for patterns in a text that arrives in pieces."""

from __future__ import annotations

from safety_svc.policy import Hit, RuleSet, worst
from safety_svc.rule_modes import Judge
from safety_svc.rule_plugins import RuleFailedError


class PatternScan:
    """Searches the text as written. It withholds text in which an incomplete match may have begun, and keeps this text
    and one character before it for assertions such as \\b.

    A match that touches the end of the text so far is not final: the next character may make it longer or make a \\b
    false. The text is still withheld and judged again with the next piece, unless the match has reached its rule's
    max_length.
    """

    __slots__ = ("_judge", "_rules", "_start", "_text", "_total", "num_clear")

    def __init__(self, rules: RuleSet, judge: Judge | None = None) -> None:
        """`rules` must have patterns. `judge` says which count; None: all."""
        self._rules = rules
        self._judge = judge
        self._text = ""
        self._start = 0
        """The offset at which the withheld text begins in the kept text: 0 or 1."""
        self._total = 0
        self.num_clear = 0
        """The number of characters, from the beginning of the text, that are not part of a match."""

    def push(self, delta: str, *, is_end: bool) -> Hit | None:
        """Search the next characters. Returns the first match that is found."""
        self._total += len(delta)
        rules = self._rules
        is_clear = not rules.unanchored_length and self._start == len(self._text)
        if is_clear and rules.prefix_first_characters.isdisjoint(delta):  # no match can begin here
            if delta:
                self._text, self._start = delta[-1], 1
            self.num_clear = self._total
            return None
        self._text += delta
        hit = self._find(is_end=is_end)
        end = len(self._text)
        if hit is not None and hit.is_failure:
            return hit  # what was withheld stays so
        start = end if is_end else self._earliest_start()
        self.num_clear = self._total - (end - start)
        kept_from = max(0, start - 1)
        self._text = self._text[kept_from:]
        self._start = start - kept_from
        return hit

    def skip(self, num_chars: int, last_char: str) -> None:
        """Account for text that is known to be clear. The text before it must be clear, too."""
        self._total += num_chars
        self._text, self._start = last_char, 1
        self.num_clear = self._total

    def _find(self, *, is_end: bool) -> Hit | None:
        text, end, base = self._text, len(self._text), self._total - len(self._text)
        hits: list[Hit] = []
        judge = self._judge
        has_prefix = self._rules.prefix.search(text, self._start) is not None
        for pattern in self._rules.patterns:
            if pattern.prefixes and not has_prefix:
                continue
            try:
                match = pattern.expression.search(text, self._start)
            except RuleFailedError:
                if pattern.rule.on_failure != "allow" if judge is None else judge.fails(pattern.rule):
                    hits.append(Hit(pattern.rule, base + self._start, is_failure=True))
                continue
            if match is None:
                continue
            start = match.start()
            is_final = is_end or match.end() < end or end - start >= pattern.max_length
            if is_final and (judge is None or judge.forbids(pattern.rule)):
                hits.append(Hit(pattern.rule, base + start))
        return worst(hits)

    def _earliest_start(self) -> int:
        """Return the offset at which the earliest incomplete match could begin."""
        text, rules = self._text, self._rules
        earliest = len(text)
        if rules.unanchored_length:
            # An incomplete match lacks at least one character, but the bound is not one less: the missing character may
            # be one that only an assertion inspects.
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
