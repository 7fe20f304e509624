"""Reads text as JSON reads what stands in its strings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

ESCAPE: Final = "\\"
"""Every escape begins with it."""
_SIMPLE: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_HIGH: Final = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
_LOW: Final = r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_CUT_LOW: Final = r"\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?"
_WHOLE: Final = rf"{_HIGH}{_LOW}|\\u[0-9a-fA-F]{{4}}|\\[\"\\/bfnrt]"
_ESCAPES: Final = re.compile(_WHOLE)
_STREAMED: Final = re.compile(rf"(?P<cut>(?:{_HIGH}(?:{_CUT_LOW})?|\\(?:u[0-9a-fA-F]{{0,3}})?)\Z)|{_WHOLE}")


class Piece(NamedTuple):
    """A part of a text."""

    start: int
    read: str
    """The characters that JSON reads."""
    end: int

    @property
    def is_escape(self) -> bool:
        return self.end - self.start != len(self.read)


def unescaped(text: str) -> str:
    """Return the text with the characters that JSON's escapes stand for. What is no escape stays as it is."""
    return _ESCAPES.sub(lambda match: _read(match[0]), text)


def pieces(text: str, *, is_end: bool) -> Iterator[Piece]:
    """Yield the parts of a text, of which an escape is one. Unless the text ends there, an escape that is cut off at
    its end is left out."""
    position = 0
    for match in (_ESCAPES if is_end else _STREAMED).finditer(text):
        if match.start() > position:
            yield Piece(position, text[position : match.start()], match.start())
        position = match.end()
        if is_end or match["cut"] is None:
            yield Piece(match.start(), _read(match[0]), match.end())
    if position < len(text):
        yield Piece(position, text[position:], len(text))


def _read(escape: str) -> str:
    kind = escape[1]
    if kind != "u":
        return _SIMPLE.get(kind, kind)
    if len(escape) == len("\\u0000"):
        return chr(int(escape[2:], 16))
    high, low = int(escape[2:6], 16), int(escape[8:], 16)
    return chr(0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00))
