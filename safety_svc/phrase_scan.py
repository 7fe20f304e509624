"""Searches for the phrases of deny lists in a text that arrives in pieces."""

from __future__ import annotations

from safety_svc.folding import SPACE, is_word
from safety_svc.policy import Hit, PhraseSet
from safety_svc.rule_modes import Judge


class PhraseScan:
    """Searches the folded text (see folding.py) with an Aho-Corasick automaton of all phrases.

    A phrase that ends in new text begins at or after the earliest position from which the text so far could still
    become a phrase. Only the text from that position on is withheld. It is
    kept together with one character before it, which decides about word boundaries.
    """

    __slots__ = ("_judge", "_offsets", "_phrases", "_start", "_text", "num_chars", "num_clear")

    def __init__(self, phrases: PhraseSet, judge: Judge | None = None) -> None:
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
        if self._start == len(self._text) and self._phrases.first_characters.isdisjoint(folded):
            if folded:
                self._text, self._offsets, self._start = folded[-1], [before + offsets[-1]], 1
            self.num_clear = self.num_chars
            return None
        self._text += folded
        self._offsets += [before + offset for offset in offsets]
        hit = self._find(is_end=is_end)
        self._advance(is_end=is_end)
        return hit

    def skip(self, num_chars: int, last_char: str) -> None:
        """Account for text that is known to be clear. The text before it must be clear, too."""
        self.num_chars += num_chars
        folded, offsets = self._phrases.fold(last_char)
        if folded:
            self._text, self._offsets, self._start = folded[-1], [self.num_chars - 1 + offsets[-1]], 1
        self.num_clear = self.num_chars

    def _find(self, *, is_end: bool) -> Hit | None:
        text, found = self._text, None
        for end, phrases in self._phrases.automaton.iter(text, self._start):
            for phrase in phrases:
                start = end + 1 - len(phrase.text)
                if phrase.whole_words and not is_whole(text, start, end + 1, is_end=is_end):
                    continue
                if self._judge is not None and not self._judge.forbids(phrase.rule):
                    continue
                if found is None or start < found[0]:
                    found = (start, phrase.rule)
        return None if found is None else Hit(found[1], self._offsets[found[0]])

    def _advance(self, *, is_end: bool) -> None:
        text, automaton = self._text, self._phrases.automaton
        first_characters = self._phrases.first_characters
        # A text that may become a phrase is at most as long as the longest phrase, so only that much is searched,
        # however much text arrived at once.
        start = len(text) if is_end else max(self._start, len(text) - self._phrases.max_length)
        while start < len(text) and (text[start] not in first_characters or not automaton.match(text[start:])):
            start += 1
        self.num_clear = self._offsets[start] if start < len(text) else self.num_chars
        kept_from = max(0, start - 1)
        self._text, self._offsets = text[kept_from:], self._offsets[kept_from:]
        self._start = start - kept_from


def is_whole(text: str, start: int, end: int, *, is_end: bool) -> bool:
    """True when text[start:end] lies between word boundaries. False while the next character is needed to know that."""
    if start > 0 and is_word(text[start - 1]) and is_word(text[start]):
        return False
    if end == len(text):
        return is_end or not is_word(text[end - 1])
    return not (is_word(text[end]) and is_word(text[end - 1]))
