"""Kimi K2:

    <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}
    <|tool_call_end|><|tool_calls_section_end|>

(without the line break). Several calls stand in a section; the number counts the conversation's calls. Source:
https://huggingface.co/moonshotai/Kimi-K2-Instruct/blob/main/docs/tool_call_guidance.md.
"""

from __future__ import annotations

import re
from typing import ClassVar, Final

from kvloom_common.parsers.core.json_call import MAX_NAME_CHARS, JsonCallParser
from kvloom_common.parsers.core.text_input import Markers, Steps

_SECTION_BEGIN: Final = "<|tool_calls_section_begin|>"
_SECTION_END: Final = "<|tool_calls_section_end|>"
_CALL_BEGIN: Final = "<|tool_call_begin|>"
_CALL_END: Final = "<|tool_call_end|>"
_ARGUMENTS: Final = "<|tool_call_argument_begin|>"

_START: Final = Markers(_SECTION_BEGIN, _CALL_BEGIN)
_END: Final = Markers(_CALL_END, _SECTION_END)
_ID: Final = re.compile(r"[A-Za-z0-9_.\-:]+")
_NUMBER: Final = re.compile(r":[0-9]*\Z")


class KimiK2Parser(JsonCallParser):
    markers: ClassVar[tuple[str, ...]] = (_SECTION_BEGIN, _SECTION_END, _CALL_BEGIN, _CALL_END, _ARGUMENTS)

    def grammar(self) -> Steps[None]:
        while True:
            marker = yield from self.text_until(_START)
            yield from self.attempt(self._calls(marker))

    def _calls(self, marker: str | None) -> Steps[None]:
        if marker == _SECTION_BEGIN:
            yield from self.expect(_CALL_BEGIN)
        while True:
            if (yield from self._call()) == _SECTION_END:
                return
            self.hold()
            if (yield from self.accept(_CALL_BEGIN, _SECTION_END)) != _CALL_BEGIN:
                return

    def _call(self) -> Steps[str | None]:
        """Returns the end marker."""
        yield from self.skip_space()
        call_id = yield from self.run_of(_ID, MAX_NAME_CHARS)
        name = _NUMBER.sub("", call_id.removeprefix("functions."))
        self.check_name(name)
        yield from self.expect(_ARGUMENTS)
        marker = yield from self.arguments(name, _END)
        return marker or (yield from self.accept(_CALL_END))
