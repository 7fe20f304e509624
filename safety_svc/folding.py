"""Folding: texts that look the same to a reader become the same string, and every folded character knows where it came
from.

NFKC and case folding per character; format characters (zero-width joiners and the like) vanish; any run of white space
is one space. Working per character keeps it streamable: folding the parts gives the folding of the whole.
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


@functools.lru_cache(maxsize=65_536)
def fold_character(character: str) -> str:
    """What one character folds to: none, one or several characters; white space folds to one space."""
    if unicodedata.category(character) == "Cf":
        return ""
    folded = unicodedata.normalize("NFKC", character).casefold()
    return "".join(SPACE if c.isspace() else c for c in folded)


def fold(text: str, *, after_space: bool = False) -> tuple[str, Sequence[int]]:
    """The folded text and, for each of its characters, the offset in `text` that it came from.

    `after_space`: the text before this one ended with white space, so leading white space adds nothing.
    """
    if _PLAIN.fullmatch(text) and not (after_space and text.startswith(SPACE)):
        return text.lower(), range(len(text))
    folded: list[str] = []
    offsets: list[int] = []
    for offset, character in enumerate(text):
        for c in fold_character(character):
            if c == SPACE and after_space:
                continue
            after_space = c == SPACE
            folded.append(c)
            offsets.append(offset)
    return "".join(folded), offsets
