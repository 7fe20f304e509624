"""Folding: texts that look the same to a reader become the same string, and every folded character knows where it came
from.

NFKD and case folding per character, so that "é" is the same whether it was typed as one character or two; Hangul
syllables stay whole (a syllable is not the beginning of a longer one). Characters that show nothing (zero-width
joiners and the like) vanish; any run of white space is one space. Working per character keeps it streamable: folding
the parts gives the folding of the whole.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Sequence
from typing import Final

SPACE: Final = " "
_PLAIN: Final = re.compile(r"(?: ?[!-~])*")
"""ASCII without runs of white space: folds one to one."""
_INVISIBLE: Final = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""Default-ignorable characters (Unicode, DerivedCoreProperties) that are not of category Cf."""


@functools.lru_cache(maxsize=65_536)
def fold_character(character: str) -> str:
    """What one character folds to: none, one or several characters; white space folds to one space."""
    if unicodedata.category(character) == "Cf" or _INVISIBLE.match(character):
        return ""
    form = "NFKC" if "\uac00" <= character <= "\ud7a3" else "NFKD"
    folded = unicodedata.normalize(form, unicodedata.normalize(form, character).casefold())
    return "".join(SPACE if c.isspace() else c for c in folded)


def fold(text: str, *, after_space: bool = False) -> tuple[str, Sequence[int]]:
    """The folded text and, for each of its characters, the offset in `text` that it came from.

    `after_space`: the folded text before this one ended with a space, so leading white space adds nothing.
    """
    if _PLAIN.fullmatch(text) and not (after_space and text.startswith(SPACE)):
        return text.lower(), range(len(text))
    folded: list[str] = []
    offsets: list[int] = []
    for offset, pieces in enumerate(map(fold_character, text)):
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


def is_word(character: str) -> bool:
    """Whether a folded character is part of a word; accents belong to the letter that they stand on."""
    return character.isalnum() or character == "_" or unicodedata.category(character).startswith("M")
