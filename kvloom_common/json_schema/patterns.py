"""Regular expressions of JSON Schema (ECMAScript's) in the syntax of the guides' compilers, which is Rust's.

What is written differently is translated: identity escapes, escapes by code, names of groups, brackets that need no
escape in ECMAScript. Look-around, back-references and word boundaries have no meaning for an automaton; a pattern with
one is refused. A translated pattern translates to itself.
"""

from __future__ import annotations

import re
from typing import Final

MAX_PATTERN_CHARS: Final = 4096
MAX_REPETITIONS: Final = 5000
MAX_GROUPS: Final = 64
"""How deep groups may be nested."""

_META: Final = frozenset("\\.+*?()|[]{}^$#&-~/")
_CLASS_META: Final = frozenset("\\[]^-&~")
_QUANTIFIER: Final = re.compile(r"\{(\d+)(,(\d*))?\}")
_SHORTHANDS: Final = frozenset("dDwWsS")
_CONTROLS: Final = {"n": "\\n", "r": "\\r", "t": "\\t", "f": "\\x0c", "v": "\\x0b"}
_PROPERTY: Final = re.compile(r"\{[A-Za-z_=]{1,40}\}|[A-Z]")
_GROUP: Final = re.compile(r"\?(?:P?<[A-Za-z_][A-Za-z0-9_]{0,63}>|:|i:|i\))")


class PatternError(ValueError):
    """The pattern cannot be followed; the message says why."""


def translated(pattern: str) -> str:
    """Raises PatternError."""
    if len(pattern) > MAX_PATTERN_CHARS:
        raise PatternError(f"is longer than {MAX_PATTERN_CHARS} characters")
    return _Translation(pattern).whole()


class _Translation:
    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0
        self._out: list[str] = []
        self._num_open = 0

    def whole(self) -> str:
        can_repeat = False
        at_start = True
        """Nothing of the alternative has been read."""
        while self._at < len(self._text):
            char = self._text[self._at]
            self._at += 1
            if char == "\\" and self._text[self._at : self._at + 1] in ("A", "z", "Z"):
                char = "^" if self._text[self._at] == "A" else "$"
                self._at += 1
            if char == "^":
                if not at_start:
                    raise PatternError("has an assertion within the text")
                self._out.append(char)
                can_repeat = False
                continue
            if char == "$":
                if self._text[self._at : self._at + 1] not in ("", "|", ")"):
                    raise PatternError("has an assertion within the text")
                self._out.append(char)
                can_repeat = at_start = False
                continue
            can_repeat, at_start = self._piece(char, can_repeat=can_repeat)
        if self._num_open:
            raise PatternError("has a group that is not closed")
        return "".join(self._out)

    def _piece(self, char: str, *, can_repeat: bool) -> tuple[bool, bool]:
        """Returns whether a quantifier may follow, and whether an alternative begins."""
        if char == "(":
            return False, self._group()
        if char == "|":
            self._out.append(char)
            return False, True
        if char == ")":
            if not self._num_open:
                raise PatternError("closes a group that is not open")
            self._num_open -= 1
            self._out.append(char)
            return True, False
        if char in "*+?" or (char == "{" and _QUANTIFIER.match(self._text, self._at - 1)):
            if not can_repeat:
                raise PatternError("repeats nothing")
            self._quantifier(char)
            return False, False
        if char == "[":
            self._class()
        elif char == "\\":
            self._out.append(self._escape(_META))
        else:
            self._out.append(_escaped(char, _META) if char in "{}]&~#" else char)
        return True, False

    def _group(self) -> bool:
        """Returns whether an alternative begins, which it does."""
        self._num_open += 1
        if self._num_open > MAX_GROUPS:
            raise PatternError(f"has groups nested more than {MAX_GROUPS} deep")
        if self._text[self._at : self._at + 1] != "?":
            self._out.append("(")
            return True
        opening = _GROUP.match(self._text, self._at)
        if opening is None:
            kinds = {"=": "look-ahead", "!": "look-ahead", "<": "look-behind"}
            raise PatternError(
                f"has {kinds.get(self._text[self._at + 1 : self._at + 2], 'a group of an unknown kind')}"
            )
        self._at = opening.end()
        head = opening.group()
        if head == "?i)":
            self._num_open -= 1
        self._out.append(f"({head}" if head.startswith("?i") else "(?:")
        return True

    def _quantifier(self, char: str) -> None:
        if char == "{":
            match = _QUANTIFIER.match(self._text, self._at - 1)
            assert match is not None  # the caller has matched it
            least, most = int(match[1]), int(match[3]) if match[3] else int(match[1])
            if most < least:
                raise PatternError("repeats at most less often than at least")
            if max(least, most) > MAX_REPETITIONS:
                raise PatternError(f"repeats more than {MAX_REPETITIONS} times")
            self._at = match.end()
            self._out.append(match.group())
        else:
            self._out.append(char)
        if self._text[self._at : self._at + 1] == "?":  # a lazy repetition matches the same texts
            self._at += 1

    def _class(self) -> None:
        text, end = self._text, len(self._text)
        negated = text[self._at : self._at + 1] == "^"
        self._at += negated
        items: list[str] = []
        while True:
            if self._at >= end:
                raise PatternError("has a class that is not closed")
            char = text[self._at]
            if char == "]":
                self._at += 1
                break
            low = self._class_item()
            if (
                text[self._at : self._at + 1] == "-"
                and text[self._at + 1 : self._at + 2] not in ("", "]")
                and not _is_shorthand(low)
            ):
                back = self._at
                self._at += 1
                high = self._class_item()
                if not _is_shorthand(high):
                    items.append(f"{low}-{high}")
                    continue
                self._at = back
            items.append(low)
        if not items:
            self._out.append(r"[\s\S]" if negated else r"[^\s\S]")
            return
        self._out.append(f"[{'^' if negated else ''}{''.join(items)}]")

    def _class_item(self) -> str:
        char = self._text[self._at]
        self._at += 1
        if char != "\\":
            return _escaped(char, _CLASS_META)
        if self._text[self._at : self._at + 1] == "b":
            self._at += 1
            return "\\x08"
        return self._escape(_CLASS_META)

    def _escape(self, meta: frozenset[str]) -> str:
        """Reads what follows a backslash."""
        text = self._text
        if self._at >= len(text):
            raise PatternError("ends with a backslash")
        char = text[self._at]
        self._at += 1
        if char in _SHORTHANDS:
            return "\\" + char
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char in "pP" and (match := _PROPERTY.match(text, self._at)) is not None:
            self._at = match.end()
            return "\\" + char + match.group()
        if char in "xu":
            return self._code(char)
        if char == "c" and text[self._at : self._at + 1].isascii() and text[self._at : self._at + 1].isalpha():
            self._at += 1
            return f"\\x{ord(text[self._at - 1]) % 32:02x}"
        if char == "0":
            return "\\x00"
        if char in "123456789k":
            raise PatternError("has a back-reference")
        if char in "bB":
            raise PatternError("has a word boundary")
        return _escaped(char, meta)

    def _code(self, kind: str) -> str:
        braced = re.compile(r"\{([0-9a-fA-F]{1,6})\}").match(self._text, self._at)
        plain = re.compile(r"[0-9a-fA-F]{2}" if kind == "x" else r"[0-9a-fA-F]{4}").match(self._text, self._at)
        if braced is not None:
            self._at, code = braced.end(), int(braced[1], 16)
        elif plain is not None:
            self._at, code = plain.end(), int(plain.group(), 16)
        else:
            return kind
        low = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})").match(self._text, self._at)
        if 0xD800 <= code < 0xDC00 and low is not None:
            self._at = low.end()
            code = 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00
        if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
            raise PatternError("names half a character, or none")
        return f"\\x{code:02x}" if code < 256 else f"\\u{{{code:x}}}"


def _is_shorthand(item: str) -> bool:
    return len(item) >= 2 and item[0] == "\\" and (item[1] in _SHORTHANDS or item[1] in "pP")


def _escaped(char: str, meta: frozenset[str]) -> str:
    return "\\" + char if char in meta else char
