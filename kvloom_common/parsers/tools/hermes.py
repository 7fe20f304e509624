"""Hermes 2 Pro and 3, Qwen 2.5 and 3, Granite 4 and many others:

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

One object per pair of markers. Sources: the chat templates of NousResearch/Hermes-3-Llama-3.1-8B and
Qwen/Qwen2.5-7B-Instruct; https://github.com/NousResearch/Hermes-Function-Calling.
"""

from __future__ import annotations

from typing import ClassVar, Final

from kvloom_common.parsers.core.json_call import JsonCallParser
from kvloom_common.parsers.core.markers import Markers
from kvloom_common.parsers.core.text_input import Steps

_START: Final = Markers("<tool_call>")
_END: Final = Markers("</tool_call>")


class HermesParser(JsonCallParser):
    markers: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")

    def grammar(self) -> Steps[None]:
        while True:
            yield from self.text_until(_START)
            yield from self.attempt(self._call())

    def _call(self) -> Steps[None]:
        if (yield from self.call_object(_END)) is None:
            yield from self.accept("</tool_call>")
