"""Finds the end of a JSON value, piece by piece."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

MAX_DEPTH: Final = 512

_SPACE: Final = re.compile(r"[ \t\r\n]*")
_STRING: Final = re.compile(r'[^"\\]*')
_SCALAR: Final = re.compile(r"[A-Za-z0-9+\-._]+")
_OPENERS: Final = {"{": "}", "[": "]"}


class JsonScanner:
    """Reads one value. `done` once its last character is consumed, `broken` at a character that cannot belong to it.

    It checks what is needed to find the end: brackets, commas, colons, quotes. Within strings it allows line breaks and
    unknown escapes, a comma may trail, and any word is a literal: models write such JSON, and it is the client who
    judges it. A number or literal ends before the character that follows it."""

    __slots__ = ("_closers", "_state", "broken", "done")

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        self._closers: list[str] = []
        self._state: Callable[[str, int, int], int] = self._value

    def scan(self, text: str, position: int, end: int) -> int:
        """Read `text[position:end]`. Returns the position behind the last character that belongs to the value."""
        while position < end and not self.done and not self.broken:
            position = self._state(text, position, end)
        return position

    def _skip_space(self, text: str, position: int, end: int) -> int:
        match = _SPACE.match(text, position, end)
        assert match is not None  # the pattern matches the empty string
        return match.end()

    def _value(self, text: str, position: int, end: int) -> int:
        position = self._skip_space(text, position, end)
        if position == end:
            return end
        char = text[position]
        if char in _OPENERS:
            if len(self._closers) == MAX_DEPTH:
                self.broken = True
                return position
            self._closers.append(_OPENERS[char])
            self._state = self._key if char == "{" else self._value
            return position + 1
        if char == '"':
            self._state = self._string
            return position + 1
        if char == "]" and self._closers and self._closers[-1] == "]":
            return self._close(position)
        if _SCALAR.match(char) is None:
            self.broken = True
            return position
        self._state = self._scalar
        return position

    def _scalar(self, text: str, position: int, end: int) -> int:
        match = _SCALAR.match(text, position, end)
        if match is not None:
            return match.end()
        self._end_value()
        return position

    def _string(self, text: str, position: int, end: int) -> int:
        match = _STRING.match(text, position, end)
        assert match is not None  # the pattern matches the empty string
        position = match.end()
        if position < end:
            if text[position] == '"':
                self._end_value()
            else:
                self._state = self._escape
            position += 1
        return position

    def _escape(self, _text: str, position: int, _end: int) -> int:
        self._state = self._string
        return position + 1

    def _key(self, text: str, position: int, end: int) -> int:
        position = self._skip_space(text, position, end)
        if position == end:
            return end
        if text[position] == '"':
            self._state = self._key_string
            return position + 1
        if text[position] == "}":
            return self._close(position)
        self.broken = True
        return position

    def _key_string(self, text: str, position: int, end: int) -> int:
        match = _STRING.match(text, position, end)
        assert match is not None  # the pattern matches the empty string
        position = match.end()
        if position < end:
            self._state = self._colon if text[position] == '"' else self._key_escape
            position += 1
        return position

    def _key_escape(self, _text: str, position: int, _end: int) -> int:
        self._state = self._key_string
        return position + 1

    def _colon(self, text: str, position: int, end: int) -> int:
        position = self._skip_space(text, position, end)
        if position == end:
            return end
        if text[position] != ":":
            self.broken = True
            return position
        self._state = self._value
        return position + 1

    def _after(self, text: str, position: int, end: int) -> int:
        position = self._skip_space(text, position, end)
        if position == end:
            return end
        char = text[position]
        if char == ",":
            self._state = self._key if self._closers[-1] == "}" else self._value
            return position + 1
        if char == self._closers[-1]:
            return self._close(position)
        self.broken = True
        return position

    def _close(self, position: int) -> int:
        self._closers.pop()
        self._end_value()
        return position + 1

    def _end_value(self) -> None:
        self._state = self._after
        self.done = not self._closers
