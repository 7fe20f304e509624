"""Folding for rules with `confusables = true`: characters that look like another one become it, by Unicode's table of
confusables (UTS #39).

Characters that look like a Latin letter become that letter in lower case. As case does not count, what looks like "I"
(l, 1 and |) becomes "l", and so does "i". "m" becomes "rn", and other characters are folded as in folding.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

from confusable_homoglyphs.confusables import confusables_data

from safety_svc.folding import fold, fold_character

_AS_L: Final = frozenset("iIlL1|")
_MARKS: Final = str.maketrans("", "", "\u200e\u200f")
"""The table of the package writes characters of scripts from right to left between these."""


@functools.lru_cache(maxsize=65_536)
def look_alike(character: str) -> str:
    """Return the zero, one or several characters that one character folds to."""
    latin = _latin(character)
    if latin:
        return latin
    folded = fold_character(character)
    return "".join(_latin(piece) or piece for piece in folded)


def fold_look_alikes(text: str, *, after_space: bool = False) -> tuple[str, Sequence[int]]:
    """Return what `fold` returns, with look-alikes as one character."""
    return fold(text, after_space=after_space, of_character=look_alike)


def spellings(text: str) -> frozenset[str]:
    """Return a phrase as it looks in small and in capital letters, which differ outside of the Latin alphabet."""
    return frozenset(folded for case in (text.lower(), text.upper()) if (folded := fold_look_alikes(case)[0].strip()))


def ascii_look_alikes() -> dict[str, str]:
    """Return the characters of ASCII, in lower case, that fold to others."""
    characters = {chr(code).lower() for code in range(128)}
    return {c: folded for c in sorted(characters) if (folded := look_alike(c)) != c and not c.isspace()}


def _latin(character: str) -> str:
    """ "" for a character that does not look like a Latin letter."""
    if character in _AS_L:
        return "l"
    if character == "m" or character == "M":
        return "rn"
    if character.isascii() and character.isalpha():
        return character.lower()
    if character == "0":
        return "o"
    for entry in confusables_data.get(character, ()):
        other = entry["c"].translate(_MARKS)
        if other in _AS_L or (len(other) == 1 and other.isascii() and other.isalpha()):
            return look_alike(other)
    return ""
