"""Qwen3-Coder (and Qwen 3.5, Nemotron 3):

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

A value is one line break away from its markers on both sides. `<tool_call>` may be missing. A value also ends at a line
that begins with the next parameter or with the end of the function, because the model sometimes forgets `</parameter>`.
Source: the chat template of Qwen/Qwen3-Coder-30B-A3B-Instruct.
"""

from __future__ import annotations

import re
from typing import ClassVar, Final

from kvloom_common.parsers.core.json_call import MAX_NAME_CHARS
from kvloom_common.parsers.core.text_input import Markers, Steps
from kvloom_common.parsers.core.typed_value import TypedValueParser

_START: Final = Markers("<tool_call>", "<function=")
_VALUE_END: Final = Markers("\n</parameter>", "</parameter>", "\n<parameter=", "\n</function>")
_NAME: Final = re.compile(r"[^<>\s]+")


class Qwen3CoderParser(TypedValueParser):
    markers: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")

    def grammar(self) -> Steps[None]:
        while True:
            marker = yield from self.text_until(_START)
            yield from self.attempt(self._call(marker))

    def _call(self, marker: str) -> Steps[None]:
        if marker == "<tool_call>":
            yield from self.expect("<function=")
        name = yield from self.run_of(_NAME, MAX_NAME_CHARS)
        self.check_name(name)
        yield from self.expect(">")
        self.begin_arguments(name)
        yield from self._parameters()
        yield from self.accept("</tool_call>")

    def _parameters(self) -> Steps[None]:
        self.hold()
        marker = yield from self.accept("<parameter=", "</function>")
        while marker in ("<parameter=", "\n<parameter="):
            key = yield from self.run_of(_NAME, MAX_NAME_CHARS)
            yield from self.expect(">")
            self.drop()
            yield from self.accept("\n", max_space=0)
            marker = yield from self.argument(key, _VALUE_END)
            self.hold()
            if marker.endswith("</parameter>"):
                marker = yield from self.accept("<parameter=", "</function>")
        self.end_call()
