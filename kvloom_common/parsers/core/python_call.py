"""Calls written as Python: the arguments become JSON while they arrive.

Strings are converted character by character, numbers and constants when they are complete. A name or an unquoted word
becomes a string.
"""

from __future__ import annotations

import re
from typing import Final

from kvloom_common.parsers.core.grammar_parser import GrammarParser
from kvloom_common.parsers.core.json_call import MAX_NAME_CHARS
from kvloom_common.parsers.core.json_text import escape, literal, quote
from kvloom_common.parsers.core.text_input import EndOfOutput, Malformed, Steps

MAX_DEPTH: Final = 64
MAX_WORD_CHARS: Final = 1024

_NAME: Final = re.compile(r"[A-Za-z0-9_.\-]+")
_WORD: Final = re.compile(r"[A-Za-z0-9_.+\-]+")
_PLAIN: Final = {"'": re.compile(r"[^'\\]+"), '"': re.compile(r'[^"\\]+')}
_ESCAPES: Final = {
    "n": "\\n",
    "t": "\\t",
    "r": "\\r",
    "b": "\\b",
    "f": "\\f",
    "\\": "\\\\",
    "'": "'",
    '"': '\\"',
    "/": "/",
    "\n": "",
}
_HEX_ESCAPES: Final = {"x": 2, "u": 4, "U": 8}
_CLOSERS: Final = {"[": "]", "(": ")", "{": "}"}


class PythonCallParser(GrammarParser):
    """The grammar's parts for calls as Python writes them."""

    def call_list(self) -> Steps[None]:
        """`[name(key=value, ...), ...]`."""
        yield from self.expect("[")
        while True:
            yield from self.call()
            separator = yield from self.expect(",", "]")
            self.hold()
            if separator == "]":
                return

    def call(self) -> Steps[None]:
        """`name(key=value, ...)`."""
        yield from self.skip_space()
        name = yield from self.run_of(_NAME, MAX_NAME_CHARS)
        self.check_name(name)
        yield from self.expect("(")
        self.commit(name)
        self.events.arguments("{")
        num_arguments = 0
        self.hold()
        while (yield from self.accept(")")) is None:
            yield from self.skip_space()
            key = yield from self.run_of(_NAME, MAX_NAME_CHARS)
            yield from self.expect("=")
            if not key:
                raise Malformed
            self.drop()
            self.events.arguments(f"{', ' if num_arguments else ''}{quote(key)}: ")
            num_arguments += 1
            yield from self._value(0)
            self.hold()
            if (yield from self.expect(",", ")")) == ")":
                break
        self.events.arguments("}")
        self.end_call()

    def _value(self, depth: int) -> Steps[None]:
        yield from self.skip_space()
        char = yield from self.peek()
        if char in "'\"":
            yield from self._string()
        elif char in "[({":
            if depth == MAX_DEPTH:
                raise Malformed
            yield from self._container(char, depth)
        else:
            yield from self._word()

    def _container(self, opening: str, depth: int) -> Steps[None]:
        """A list, a tuple (which becomes a list) or a dictionary."""
        self.take(1)
        closer = _CLOSERS[opening]
        is_dict = opening == "{"
        self.events.arguments("{" if is_dict else "[")
        num_items = 0
        while (yield from self.accept(closer)) is None:
            if num_items:
                self.events.arguments(", ")
            num_items += 1
            if is_dict:
                yield from self._key()
                yield from self.expect(":")
                self.events.arguments(": ")
            yield from self._value(depth + 1)
            if (yield from self.expect(",", closer)) == closer:
                break
        self.events.arguments("}" if is_dict else "]")

    def _key(self) -> Steps[None]:
        """A dictionary's key, which is a string in JSON."""
        yield from self.skip_space()
        if (yield from self.peek()) in "'\"":
            yield from self._string()
        else:
            key = yield from self.run_of(_WORD, MAX_NAME_CHARS)
            if not key:
                raise Malformed
            self.events.arguments(quote(key))

    def _word(self) -> Steps[None]:
        """A number, a constant, or an unquoted word, which becomes a string."""
        self.hold()
        try:
            word = yield from self.run_of(_WORD, MAX_WORD_CHARS)
        except EndOfOutput:
            word = "".join(self.held)
            self.events.arguments(word and (literal(word) or quote(word)))
            self.drop()
            raise
        if not word:
            raise Malformed
        self.drop()
        self.events.arguments(literal(word) or quote(word))

    def _string(self) -> Steps[None]:
        delimiter = self.take(1)
        plain = _PLAIN[delimiter]
        self.events.arguments('"')
        while (yield from self.peek()) != delimiter:
            match = plain.match(self.text, self.position)
            if match is not None:
                self.events.arguments(escape(self.take(match.end() - self.position)))
            else:
                yield from self._escape()
        self.take(1)
        self.events.arguments('"')

    def _escape(self) -> Steps[None]:
        self.hold()
        try:
            self.events.arguments((yield from self._escaped()))
        except EndOfOutput:
            self.events.arguments(escape("".join(self.held)))
            raise
        finally:
            self.drop()

    def _escaped(self) -> Steps[str]:
        """The JSON of an escape sequence. Unknown ones stand for themselves, as in Python."""
        self.take(1)
        char = yield from self.peek()
        self.take(1)
        if char not in _HEX_ESCAPES:
            return _ESCAPES.get(char, escape("\\" + char))
        digits = ""
        while len(digits) < _HEX_ESCAPES[char] and (yield from self.peek()) in "0123456789abcdefABCDEF":
            digits += self.take(1)
        if len(digits) < _HEX_ESCAPES[char]:
            return escape("\\" + char + digits)
        code = int(digits, 16)
        return f"\\u{code:04x}" if code <= 0xFFFF else escape(chr(code)) if code <= 0x10FFFF else "\ufffd"
