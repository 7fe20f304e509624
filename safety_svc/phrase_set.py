"""The phrases of deny lists that are found in text which is folded in one way.

All of them are in one Aho-Corasick automaton, so a text is searched once however many there are. Where a phrase may
begin is known by its first character, by the boundary of a word before it, and by its first few characters. So most
text is neither searched nor withheld, however long the list is.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple, Protocol

import ahocorasick

from safety_svc.folding import Fold, is_letter, is_word, letters_of
from safety_svc.rule_modes import Rule

_BEGINNING_CHARS: Final = 4
"""Most positions are told from the beginning of a phrase by so many characters, or by those of the shortest phrase."""
_NO_WORD_BEGINS: Final = r"(?<![^\W_][^\W_])"
"""Behind the first character of a phrase: not if it and the one before it are letters or digits."""


@dataclasses.dataclass(frozen=True, slots=True)
class Phrase:
    rule: Rule
    text: str
    """The folded phrase."""
    whole_words: bool
    is_look_alike: bool = False
    """It was folded by `fold_look_alikes`, and texts are to be folded so to find it."""
    is_spaced: bool = False
    """It has letters only, and is to be found in a text's letters (see `letters_of`)."""


class PhraseJudge(Protocol):
    """Says which phrases count."""

    def forbids(self, rule: Rule) -> bool:
        """Return True when a phrase of the rule, which has been found, counts."""
        ...


class FoundPhrase(NamedTuple):
    """A phrase in a folded text."""

    start: int
    rule: Rule


class PhraseSet:
    """Phrases that are found in text which is folded in one way, and whose letters count alone or do not."""

    def __init__(self, phrases: Sequence[Phrase], fold: Fold, *, is_spaced: bool = False) -> None:
        self.fold = fold
        self._is_spaced = is_spaced
        self._max_length = max(len(phrase.text) for phrase in phrases)
        """The length of the longest phrase in folded characters, or in letters."""
        self._are_words = all(phrase.whole_words for phrase in phrases)
        firsts = "".join(map(re.escape, sorted({phrase.text[0] for phrase in phrases})))
        self._first = re.compile(f"[{firsts}]")
        self._start = re.compile(f"[{firsts}]{_NO_WORD_BEGINS}") if self._are_words else self._first
        num_chars = self._num_beginning_chars = min(_BEGINNING_CHARS, *(len(phrase.text) for phrase in phrases))
        self._beginnings = frozenset(phrase.text[:num] for phrase in phrases for num in range(1, num_chars + 1))
        by_text: dict[str, list[Phrase]] = {}
        for phrase in phrases:
            by_text.setdefault(phrase.text, []).append(phrase)
        self._automaton: Any = ahocorasick.Automaton()
        for text, same in by_text.items():
            self._automaton.add_word(text, tuple(same))
        self._automaton.make_automaton()

    def search(
        self, folded: str, first: int, judge: PhraseJudge | None, *, is_end: bool
    ) -> tuple[FoundPhrase | None, int]:
        """Search for phrases that begin at or after `first`. Returns the first one that counts, and the position from
        which the rest of the text may become one, or its length. `judge` None: all count. `is_end`: no text follows."""
        text, at, begins = folded, None, self._start
        if self._is_spaced:
            if begins.search(folded, first) is None:
                return None, len(folded)
            text, at = letters_of(folded, first)
            first, begins = 0, self._first
        num_chars, beginnings = self._num_beginning_chars, self._beginnings
        starts: list[int] = []
        while (match := begins.search(text, first)) is not None:  # faster than `finditer` for a token
            start = match.start()
            if text[start : start + num_chars] in beginnings:
                starts.append(start)
            first = start + 1
        if not starts:
            return None, len(folded)
        found = self._find(folded, text, at, starts[0], judge, is_end=is_end)
        if not is_end:
            size = len(text)
            for start in starts:
                # A text that may become a phrase is at most as long as the longest phrase.
                if size - start > self._max_length or (at is not None and self._is_in_word(folded, at[start])):
                    continue
                if size - start <= num_chars or self._automaton.match(text[start:]):
                    return found, start if at is None else at[start]
        return found, len(folded)

    def _find(
        self, folded: str, text: str, at: Sequence[int] | None, first: int, judge: PhraseJudge | None, *, is_end: bool
    ) -> FoundPhrase | None:
        """`at` has the position in the folded text of each character of `text`; None: they are the same."""
        found: FoundPhrase | None = None
        for last, phrases in self._automaton.iter(text, first):
            for phrase in phrases:
                start, end = last + 1 - len(phrase.text), last + 1
                if at is not None:
                    start, end = at[start], at[last] + 1
                if phrase.whole_words and not _is_whole(folded, start, end, is_end=is_end, is_spaced=self._is_spaced):
                    continue
                if (judge is None or judge.forbids(phrase.rule)) and (found is None or start < found.start):
                    found = FoundPhrase(start, phrase.rule)
        return found

    def _is_in_word(self, folded: str, start: int) -> bool:
        return self._are_words and start > 0 and is_letter(folded[start - 1])


def phrase_sets(phrases: Iterable[Phrase], fold: Fold, fold_look_alikes: Fold) -> tuple[PhraseSet, ...]:
    """Sort phrases by how texts are folded to find them. Making the sets takes long."""
    sorts: dict[tuple[bool, bool], list[Phrase]] = {}
    for phrase in phrases:
        sorts.setdefault((phrase.is_look_alike, phrase.is_spaced), []).append(phrase)
    return tuple(
        PhraseSet(own, fold_look_alikes if is_look_alike else fold, is_spaced=is_spaced)
        for (is_look_alike, is_spaced), own in sorts.items()
    )


def _is_whole(text: str, start: int, end: int, *, is_end: bool, is_spaced: bool) -> bool:
    """True when text[start:end] lies between word boundaries. False while the next character is needed to know that."""
    is_part = is_letter if is_spaced else is_word
    if start > 0 and is_part(text[start - 1]) and is_part(text[start]):
        return False
    if end == len(text):
        return is_end or not is_part(text[end - 1])
    return not (is_part(text[end]) and is_part(text[end - 1]))
