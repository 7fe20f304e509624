"""Searches for the phrases of deny lists in a text that arrives in pieces."""

from __future__ import annotations

from safety_svc.folding import SPACE
from safety_svc.phrase_set import PhraseJudge, PhraseSet
from safety_svc.policy import Hit


class PhraseScan:
    """Searches the folded text (see folding.py) for all phrases of a set.

    A phrase that ends in new text begins at or after the earliest position from which the text so far could still
    become a phrase. Only the text from that position on is withheld. It is
    kept together with one character before it, which decides about word boundaries.
    """

    __slots__ = ("_judge", "_offsets", "_phrases", "_start", "_text", "num_chars", "num_clear")

    def __init__(self, phrases: PhraseSet, judge: PhraseJudge | None = None) -> None:
        """`judge` says which phrases count; None: all."""
        self._phrases = phrases
        self._judge = judge
        self._text = ""
        self._offsets: list[int] = []
        """For each kept folded character, its offset from the beginning of the original text."""
        self._start = 0
        """The offset from which the kept text may still become a phrase. At most one character precedes it."""
        self.num_chars = 0
        self.num_clear = 0
        """The number of characters, from the beginning of the text, that are not part of a phrase."""

    def copy(self) -> PhraseScan:
        """Return a scan that goes on from here by itself."""
        copied = PhraseScan(self._phrases, self._judge)
        copied._text, copied._offsets, copied._start = self._text, list(self._offsets), self._start
        copied.num_chars, copied.num_clear = self.num_chars, self.num_clear
        return copied

    def push(self, delta: str, *, is_end: bool) -> Hit | None:
        """Search the next characters. Returns the first phrase that is found."""
        folded, offsets = self._phrases.fold(delta, after_space=self._text.endswith(SPACE))
        before, self.num_chars = self.num_chars, self.num_chars + len(delta)
        text = self._text + folded
        found, start = self._phrases.search(text, self._start, self._judge, is_end=is_end)
        if start == len(text) and found is None:
            if folded:
                self._text, self._offsets, self._start = folded[-1], [before + offsets[-1]], 1
            elif text:
                self._text, self._offsets, self._start = text[-1], self._offsets[-1:], 1
            self.num_clear = self.num_chars
            return None
        self._offsets += [before + offset for offset in offsets]
        hit = None if found is None else Hit(found.rule, self._offsets[found.start])
        self.num_clear = self._offsets[start] if start < len(text) else self.num_chars
        kept_from = max(0, start - 1)
        self._text, self._offsets, self._start = text[kept_from:], self._offsets[kept_from:], start - kept_from
        return hit

    def skip(self, num_chars: int, last_char: str) -> None:
        """Account for text that is known to be clear. The text before it must be clear, too."""
        self.num_chars += num_chars
        folded, offsets = self._phrases.fold(last_char)
        if folded:
            self._text, self._offsets, self._start = folded[-1], [self.num_chars - 1 + offsets[-1]], 1
        self.num_clear = self.num_chars
