"""Folding: texts that look the same to a reader become the same string, and every folded character maps back to its
position in the original text. The second part of this module leaves out what stands between spaced-out letters.

Each character is normalized with NFKD and case-folded, so that "é" is the same whether it was typed as one character or
as two. Hangul syllables stay whole, because a syllable is not the beginning of a longer one. Invisible characters, such
as zero-width joiners, are dropped. Any run of white space becomes one space. Because folding works per character, it
can be streamed: folding the parts of a text gives the folding of the whole.
"""

from __future__ import annotations

import functools
import itertools
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

SPACE: Final = " "
MAX_GAP: Final = 3
"""So many folded characters may stand between two letters that are spaced out."""
_PLAIN: Final = re.compile(r"(?: ?[!-~])*")
"""ASCII without runs of white space, in which every character folds to exactly one."""
_ASCII_LETTERS: Final = re.compile("[a-z0-9]+")
_INVISIBLE: Final = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""Default-ignorable characters (Unicode's DerivedCoreProperties) outside the category Cf."""


@functools.lru_cache(maxsize=65_536)
def fold_character(character: str) -> str:
    """Return the zero, one or several characters that one character folds to. White space folds to one space."""
    if unicodedata.category(character) == "Cf" or _INVISIBLE.match(character):
        return ""
    form = "NFKC" if "\uac00" <= character <= "\ud7a3" else "NFKD"
    folded = unicodedata.normalize(form, unicodedata.normalize(form, character).casefold())
    return "".join(SPACE if c.isspace() else c for c in folded)


def fold(
    text: str, *, after_space: bool = False, of_character: Callable[[str], str] = fold_character
) -> tuple[str, Sequence[int]]:
    """Return the folded text and, for each of its characters, the offset in `text` from which it came.

    `after_space` means that the folded text before this one ended with a space: leading white space then adds nothing.
    `of_character` folds one character.
    """
    if of_character is fold_character and _PLAIN.fullmatch(text) and not (after_space and text.startswith(SPACE)):
        return text.lower(), range(len(text))
    folded: list[str] = []
    offsets: list[int] = []
    for offset, pieces in enumerate(map(of_character, text)):
        for c in pieces:
            if c == SPACE:
                if after_space:
                    continue
                after_space = True
            else:
                after_space = False
            folded.append(c)
            offsets.append(offset)
    return "".join(folded), offsets


class Fold(Protocol):
    """A way of folding."""

    def __call__(self, text: str, *, after_space: bool = False) -> tuple[str, Sequence[int]]:
        """Return what `fold` returns."""
        ...


@functools.lru_cache(maxsize=65_536)
def is_letter(character: str) -> bool:
    """True when a folded character is a letter or a digit. Combining accents belong to their letter."""
    return character.isalnum() or unicodedata.category(character).startswith("M")


def is_word(character: str) -> bool:
    """True when a folded character is part of a word."""
    return character == "_" or is_letter(character)


def letters_of(folded: str, start: int = 0) -> tuple[str, Sequence[int]]:
    """Return the letters of a folded text from `start` on, and for each of them its offset in the folded text. "l a.u"
    and "la-u" have the same letters. Where more than MAX_GAP other characters stand between two letters, or behind the
    last one, a space stands for them."""
    letters: list[str] = []
    offsets: list[int] = []
    behind = start
    for first, end in (*_runs_of_letters(folded, start), (len(folded), len(folded))):
        if first - behind > MAX_GAP:
            letters.append(SPACE)
            offsets.append(behind)
        letters.append(folded[first:end])
        offsets += range(first, end)
        behind = end
    return "".join(letters), offsets


def _runs_of_letters(folded: str, start: int) -> Iterator[tuple[int, int]]:
    if folded.isascii():
        yield from (match.span() for match in _ASCII_LETTERS.finditer(folded, start))
        return
    for are_letters, run in itertools.groupby(range(start, len(folded)), lambda at: is_letter(folded[at])):
        if are_letters:
            positions = list(run)
            yield positions[0], positions[-1] + 1
