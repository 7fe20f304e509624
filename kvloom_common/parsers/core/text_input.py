"""Text that has arrived and is not consumed, and generators that wait for more of it.

A grammar is a generator. Where it needs a character that has not arrived, it yields, and continues when more text was
pushed. Every decision is made as soon as the characters it needs are there, and never depends on whether more text has
arrived already: that makes a grammar's results independent of how the text is split.

Finds markers in text, and holds back only what may become one.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Final, TypeAlias, TypeVar

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


T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]

_SPACE_RUN: Final = re.compile(f"[{SPACE}]*")
_BOUNDED_SPACE: Final = re.compile(f"[{SPACE}]{{0,{MAX_SPACE + 1}}}")


class EndOfOutput(Exception):  # noqa: N818  (not an error)
    """The output ended where the grammar needs more text."""


class Malformed(Exception):  # noqa: N818  (the model's error, not ours)
    """The text is not what the grammar expects here. The character that shows it has not been consumed."""


class TextInput:
    """Consumes text. While `holding`, what is consumed is kept in `held`, so that it can be given back as text."""

    def __init__(self) -> None:
        self.text = ""
        self.position = 0
        self.ended = False
        self.holding = False
        self.held: list[str] = []

    def push(self, text: str) -> None:
        self.text = self.text[self.position :] + text
        self.position = 0

    def take(self, num_chars: int) -> str:
        piece = self.text[self.position : self.position + num_chars]
        self.position += num_chars
        if self.holding:
            self.held.append(piece)
        return piece

    def hold(self) -> None:
        """Keep what is consumed from here on."""
        self.holding = True
        self.held.clear()

    def drop(self) -> None:
        """Drops what was held: it is syntax that has been understood."""
        self.holding = False
        self.held.clear()

    def more(self) -> Steps[None]:
        """Wait for more text. Raises EndOfOutput."""
        if self.ended:
            raise EndOfOutput
        yield

    def peek(self) -> Steps[str]:
        """The next character, which is not consumed."""
        while self.position >= len(self.text):
            yield from self.more()
        return self.text[self.position]

    def accept(self, *literals: str, max_space: int = MAX_SPACE) -> Steps[str | None]:
        """Consume whitespace and the one of `literals` that comes next. None, with nothing consumed, if none does.
        No literal may begin with another one, nor with whitespace unless `max_space` is 0."""
        while True:
            text = self.text
            start = self.position
            if max_space:
                match = _BOUNDED_SPACE.match(text, start)
                assert match is not None  # the pattern matches the empty string
                start = match.end()
                if start - self.position > max_space:
                    return None
            for literal in literals:
                if text.startswith(literal, start):
                    self.take(start - self.position + len(literal))
                    return literal
            rest = text[start : start + max(map(len, literals))]
            if not any(literal.startswith(rest) for literal in literals):
                return None
            yield from self.more()

    def expect(self, *literals: str, max_space: int = MAX_SPACE) -> Steps[str]:
        """Like `accept`. Raises Malformed if none comes."""
        literal = yield from self.accept(*literals, max_space=max_space)
        if literal is None:
            raise Malformed
        return literal

    def skip_space(self) -> Steps[None]:
        """Consume all whitespace."""
        while True:
            match = _SPACE_RUN.match(self.text, self.position)
            assert match is not None  # the pattern matches the empty string
            if match.end() > self.position:
                self.take(match.end() - self.position)
            if self.position < len(self.text):
                return
            yield from self.more()

    def see_past_space(self) -> Steps[None]:
        """Wait until it is known what follows the whitespace that comes next. Nothing is consumed."""
        while True:
            match = _BOUNDED_SPACE.match(self.text, self.position)
            assert match is not None  # the pattern matches the empty string
            if match.end() < len(self.text) or match.end() - self.position > MAX_SPACE:
                return
            yield from self.more()

    def run_of(self, characters: re.Pattern[str], max_chars: int) -> Steps[str]:
        """Consume the longest run of characters of a class (`[...]+`), perhaps none. Raises Malformed when it is longer
        than `max_chars`."""
        pieces: list[str] = []
        num_left = max_chars
        while True:
            match = characters.match(self.text, self.position)
            if match is not None:
                if num_left == 0:
                    raise Malformed
                piece = self.take(min(match.end() - self.position, num_left))
                num_left -= len(piece)
                pieces.append(piece)
            elif self.position < len(self.text):
                return "".join(pieces)
            else:
                yield from self.more()
