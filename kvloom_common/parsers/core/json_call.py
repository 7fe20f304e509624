"""Calls whose arguments are JSON: streamed verbatim.

Arguments begin with `{`, or are a string that holds JSON (some models quote them), or are `null`. The call is committed
at their first character.
"""

from __future__ import annotations

import json
import re
from typing import Final

from kvloom_common.parsers.core.grammar_parser import GrammarParser
from kvloom_common.parsers.core.json_scanner import JsonScanner
from kvloom_common.parsers.core.text_input import EndOfOutput, Malformed, Markers, Steps

MAX_NAME_CHARS: Final = 256
MAX_HEAD_CHARS: Final = 65_536
"""A call's fields before its name is known, at most."""

_PLAIN: Final = re.compile(r'[^"\\]+')
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_HEX_DIGITS: Final = "0123456789abcdefABCDEF"
_OTHER_FIELDS: Final = ("id", "index", "type")
_ARGUMENTS: Final = ("arguments", "parameters")


class JsonCallParser(GrammarParser):
    """The grammar's parts for JSON calls."""

    def calls(self, end: Markers | None = None) -> Steps[str | None]:
        """One call as a JSON object, or an array of them. Returns the end marker if that was consumed, too."""
        opening = yield from self.expect("{", "[")
        if opening == "{":
            return (yield from self._call_fields(end))
        while True:
            yield from self.expect("{")
            marker = yield from self._call_fields(end)
            if marker is not None:
                return marker
            separator = yield from self.expect(",", "]")
            self.hold()
            if separator == "]":
                return None

    def call_object(self, end: Markers | None = None) -> Steps[str | None]:
        """One call as a JSON object. Returns the end marker if that was consumed, too."""
        yield from self.expect("{")
        return (yield from self._call_fields(end))

    def _call_fields(self, end: Markers | None) -> Steps[str | None]:
        name = ""
        early = ""  # arguments that came before the name
        committed = False
        while (yield from self.expect('"', "}")) == '"':
            key = yield from self._string(MAX_NAME_CHARS)
            yield from self.expect(":")
            if key == "name" and not committed:
                yield from self.expect('"')
                name = yield from self._string(MAX_NAME_CHARS)
                self.check_name(name)
                if early:
                    committed = True
                    self._whole_call(name, early)
            elif key in _ARGUMENTS and not committed and name:
                committed = True
                marker = yield from self.arguments(name, end)
                if marker is not None:
                    return marker
            elif key in _ARGUMENTS and not committed:
                early = yield from self._early_arguments()
            elif committed or key in _OTHER_FIELDS:
                yield from self._skip_value()
            else:
                raise Malformed  # at once: an answer that is a JSON object should not wait for its end
            if (yield from self.expect(",", "}")) == "}":
                break
        if not committed:
            self.check_name(name)
            self._whole_call(name, early or "{}")
        self.hold()
        return None

    def arguments(self, name: str, end: Markers | None = None) -> Steps[str | None]:
        """The whole call, from its arguments' first character on. Arguments that turn out to be no JSON continue up to
        the end marker, which is returned; without one, they end there, and Malformed is raised."""
        opening = yield from self.expect("{", '"', "null")
        self.commit(name)
        if opening == "{":
            if not (yield from self._object()):
                if end is None:
                    raise Malformed
                marker = yield from self.until(end, self.events.arguments)
                self.end_call()
                return marker
        elif opening == "null" or not (yield from self._quoted_object()):
            self.events.arguments("{}")
        self.end_call()
        return None

    def _object(self) -> Steps[bool]:
        """Stream an object whose `{` is consumed. False when it is broken."""
        scanner = JsonScanner()
        scanner.scan("{", 0, 1)
        self.events.arguments("{")
        while not scanner.done:
            end = scanner.scan(self.text, self.position, len(self.text))
            self.events.arguments(self.take(end - self.position))
            if scanner.broken:
                return False
            if not scanner.done:
                yield from self.more()
        return True

    def _quoted_object(self) -> Steps[bool]:
        """Stream what a JSON string holds, behind its opening quote. False when it is empty."""
        any_text = False
        while (yield from self.peek()) != '"':
            match = _PLAIN.match(self.text, self.position)
            if match is not None:
                self.events.arguments(self.take(match.end() - self.position))
            else:
                yield from self._quoted_escape()
            any_text = True
        self.take(1)
        return any_text

    def _quoted_escape(self) -> Steps[None]:
        self.hold()
        try:
            self.events.arguments((yield from self._escape()))
        except EndOfOutput:
            self.events.arguments("".join(self.held))
            raise
        finally:
            self.drop()

    def _escape(self) -> Steps[str]:
        """The character that an escape means. The two halves of a surrogate pair are one character."""
        raw = yield from self._raw_escape()
        if raw[1] != "u":
            return _decode(raw)
        if raw[2:4].lower() in ("d8", "d9", "da", "db") and (yield from self.accept("\\u", max_space=0)):
            return _decode(raw + "\\u" + (yield from self._hex()))
        return _decode(raw)

    def _raw_escape(self) -> Steps[str]:
        raw = self.take(1)
        yield from self.peek()
        raw += self.take(1)
        return raw + (yield from self._hex()) if raw == "\\u" else raw

    def _hex(self) -> Steps[str]:
        digits = ""
        while len(digits) < 4 and (yield from self.peek()) in _HEX_DIGITS:
            digits += self.take(1)
        return digits

    def _string(self, max_chars: int) -> Steps[str]:
        """A string, behind its opening quote. Raises Malformed."""
        pieces: list[str] = []
        num_left = max_chars
        while (yield from self.peek()) != '"':
            if self.text[self.position] == "\\":
                piece = yield from self._raw_escape()
            else:
                piece = yield from self.run_of(_PLAIN, num_left)
            pieces.append(piece)
            num_left -= len(piece)
            if num_left < 0:
                raise Malformed
        self.take(1)
        try:
            return _without_surrogates(json.loads('"' + "".join(pieces) + '"', strict=False))
        except ValueError:
            raise Malformed from None

    def _early_arguments(self) -> Steps[str]:
        """Arguments that come before the name, whole."""
        if (yield from self.accept('"')) is not None:
            return (yield from self._string(MAX_HEAD_CHARS)) or "{}"
        value = yield from self._skip_value()
        if value == "null":
            return "{}"
        if not value.startswith("{"):
            raise Malformed
        return value

    def _skip_value(self) -> Steps[str]:
        """Any value, whole. Raises Malformed when it is broken or too long."""
        yield from self.skip_space()
        scanner = JsonScanner()
        pieces: list[str] = []
        num_left = MAX_HEAD_CHARS
        while not scanner.done:
            end = min(len(self.text), self.position + num_left)
            piece = self.take(scanner.scan(self.text, self.position, end) - self.position)
            num_left -= len(piece)
            pieces.append(piece)
            if scanner.broken:
                raise Malformed
            if scanner.done:
                break
            if num_left == 0:
                raise Malformed
            if self.position == len(self.text):
                yield from self.more()
        return "".join(pieces)

    def _whole_call(self, name: str, arguments: str) -> None:
        self.commit(name)
        self.events.arguments(arguments)
        self.end_call()


def _decode(raw: str) -> str:
    """An escape's text. Half a surrogate pair is U+FFFD, and what is no escape stands for itself."""
    try:
        text: str = json.loads(f'"{raw}"')
    except ValueError:
        return raw
    return _without_surrogates(text)


def _without_surrogates(text: str) -> str:
    """Halves of surrogate pairs cannot be encoded."""
    return _SURROGATE.sub("\ufffd", text)
