"""Bare values between markers, which become JSON by the tool's schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvloom_common.parsers.core.grammar_parser import GrammarParser
from kvloom_common.parsers.core.json_text import allowed_types, escape, quote, typed
from kvloom_common.parsers.core.text_input import EndOfOutput, Markers, Steps

MAX_VALUE_CHARS: Final = 65_536
"""A value that is no string is held until it is whole. A longer one is taken for a string."""

_STRING_ONLY: Final = frozenset(("string",))


class TypedValueParser(GrammarParser):
    """The grammar's parts for calls whose arguments stand one by one between markers."""

    def begin_arguments(self, name: str) -> None:
        self.commit(name)
        self._schema = self.tools.get(name, {})
        self._num_arguments = 0
        self.events.arguments("{")

    def end_call(self) -> None:
        self.events.arguments("}")
        super().end_call()

    def argument(self, key: str, end: Markers) -> Steps[str]:
        """The value of an argument, up to the marker that ends it, which is returned."""
        self.events.arguments(f"{', ' if self._num_arguments else ''}{quote(key)}: ")
        self._num_arguments += 1
        types = self._types(key)
        if types == _STRING_ONLY:
            return (yield from self._string(end))
        value = _HeldValue(self.events.arguments)
        try:
            marker = yield from self.until(end, value.add)
        except EndOfOutput:
            value.finish(types)
            raise
        value.finish(types)
        return marker

    def _string(self, end: Markers) -> Steps[str]:
        self.events.arguments('"')
        marker = yield from self.until(end, lambda piece: self.events.arguments(escape(piece)))
        self.events.arguments('"')
        return marker

    def _types(self, key: str) -> frozenset[str]:
        """Returns the types that the schema allows. A parameter of which the schema says nothing is a string."""
        properties = self._schema.get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        return allowed_types(schema) or _STRING_ONLY


class _HeldValue:
    """A value that is converted when it is whole."""

    def __init__(self, emit: Any) -> None:
        self._emit = emit
        self._pieces: list[str] = []
        self._num_chars = 0
        self._is_string = False

    def add(self, piece: str) -> None:
        if self._is_string:
            self._emit(escape(piece))
            return
        self._pieces.append(piece)
        self._num_chars += len(piece)
        if self._num_chars > MAX_VALUE_CHARS:
            self._is_string = True
            self._emit('"' + escape("".join(self._pieces)))
            self._pieces.clear()

    def finish(self, types: frozenset[str]) -> None:
        self._emit('"' if self._is_string else typed("".join(self._pieces), types))
