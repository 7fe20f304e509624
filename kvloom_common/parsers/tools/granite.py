"""Granite 3.0 to 3.3:

    <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]
    <tool_call>[{"name": "get_weather", "arguments": {"city": "Paris"}}]

Granite 3.1 writes the second marker. (Granite 4 writes the form of `hermes`, which is accepted here, too.) Sources: the
chat templates of ibm-granite/granite-3.0-8b-instruct, -3.1- and -3.3-.
"""

from __future__ import annotations

from typing import ClassVar, Final

from kvloom_common.parsers.core.json_call import JsonCallParser
from kvloom_common.parsers.core.markers import Markers
from kvloom_common.parsers.core.text_input import Steps

_START: Final = Markers("<|tool_call|>", "<tool_call>")
_END: Final = Markers("</tool_call>")


class GraniteParser(JsonCallParser):
    markers: ClassVar[tuple[str, ...]] = ("<|tool_call|>", "<tool_call>", "</tool_call>")

    def grammar(self) -> Steps[None]:
        while True:
            marker = yield from self.text_until(_START)
            yield from self.attempt(self._calls(marker))

    def _calls(self, marker: str) -> Steps[None]:
        end = _END if marker == "<tool_call>" else None
        if (yield from self.calls(end)) is None and end is not None:
            yield from self.accept("</tool_call>")
