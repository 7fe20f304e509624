"""Finds markers in text, and holds back only what may become one."""

from __future__ import annotations

import re
from typing import Final

SPACE: Final = " \t\r\n"
MAX_SPACE: Final = 64
"""Whitespace next to a marker is part of it, up to so many characters."""


class Markers:
    """A set of markers to look for. None may begin with another one, nor, where whitespace is held, with whitespace."""

    __slots__ = ("_firsts", "_prefixes", "max_chars", "pattern", "strings")

    def __init__(self, *strings: str) -> None:
        self.strings = strings
        self.pattern = re.compile("|".join(map(re.escape, strings)))
        self.max_chars = max(map(len, strings))
        self._prefixes = frozenset(string[:length] for string in strings for length in range(1, len(string)))
        self._firsts = re.compile(f"[{re.escape(''.join(sorted({string[0] for string in strings})))}]")

    def undecided_from(self, text: str, position: int) -> int:
        """Where the longest end of `text[position:]` begins that may be the beginning of a marker."""
        for match in self._firsts.finditer(text, max(position, len(text) - self.max_chars + 1)):
            if text[match.start() :] in self._prefixes:
                return match.start()
        return len(text)


def space_from(text: str, position: int, end: int) -> int:
    """Where the whitespace begins that stands before `end`: at most MAX_SPACE characters, none before `position`."""
    lowest = max(position, end - MAX_SPACE)
    while end > lowest and text[end - 1] in SPACE:
        end -= 1
    return end
