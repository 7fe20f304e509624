"""Llama 3.1 to 3.3:

    {"name": "get_weather", "parameters": {"city": "Paris"}}
    <|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "get_time", "parameters": {}}

The whole output is the call, or what follows `<|python_tag|>` is. "arguments" is accepted, too. Several calls are
separated by semicolons, commas or lines. Source: https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/.
"""

from __future__ import annotations

from typing import ClassVar, Final

from kvloom_common.parsers.core.json_call import JsonCallParser
from kvloom_common.parsers.core.markers import Markers
from kvloom_common.parsers.core.text_input import Steps

_TAG: Final = Markers("<|python_tag|>")


class Llama3JsonParser(JsonCallParser):
    markers: ClassVar[tuple[str, ...]] = ("<|python_tag|>",)

    def grammar(self) -> Steps[None]:
        self.hold()
        yield from self.attempt(self._calls())
        while True:
            yield from self.text_until(_TAG)
            yield from self.attempt(self._calls())

    def _calls(self) -> Steps[None]:
        while True:
            yield from self.call_object()
            if (yield from self.accept(";", ",")) is not None:
                self.hold()
