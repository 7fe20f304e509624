"""DeepSeek V3 and R1, whose calls stand in a fenced block, and V3.1, whose do not:

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
    ```json
    {"city": "Paris"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>
    <｜tool▁calls▁end｜>

(the latter in one line). Several calls stand between the outer markers. Sources: the chat templates of
deepseek-ai/DeepSeek-V3-0324, DeepSeek-R1-0528 and DeepSeek-V3.1.
"""

from __future__ import annotations

import re
from typing import ClassVar, Final

from kvloom_common.parsers.core.json_call import MAX_NAME_CHARS, JsonCallParser
from kvloom_common.parsers.core.text_input import Markers, Steps

_CALLS_BEGIN: Final = "<｜tool▁calls▁begin｜>"
_CALLS_END: Final = "<｜tool▁calls▁end｜>"
_CALL_BEGIN: Final = "<｜tool▁call▁begin｜>"
_CALL_END: Final = "<｜tool▁call▁end｜>"
_SEPARATOR: Final = "<｜tool▁sep｜>"

_START: Final = Markers(_CALLS_BEGIN, _CALL_BEGIN)
_END: Final = Markers(_CALL_END, _CALLS_END)
_FENCED_END: Final = Markers("\n```" + _CALL_END, "```" + _CALL_END, _CALL_END, _CALLS_END)
_NAME: Final = re.compile(r"[A-Za-z0-9_.\-]+")


class DeepseekV31Parser(JsonCallParser):
    markers: ClassVar[tuple[str, ...]] = (_CALLS_BEGIN, _CALLS_END, _CALL_BEGIN, _CALL_END, _SEPARATOR)

    def grammar(self) -> Steps[None]:
        while True:
            marker = yield from self.text_until(_START)
            yield from self.attempt(self._calls(marker))

    def _calls(self, marker: str) -> Steps[None]:
        if marker == _CALLS_BEGIN:
            yield from self.expect(_CALL_BEGIN)
        while True:
            if (yield from self._call()) == _CALLS_END:
                return
            self.hold()
            if (yield from self.accept(_CALL_BEGIN, _CALLS_END)) != _CALL_BEGIN:
                return

    def _call(self) -> Steps[str | None]:
        """Returns the end marker."""
        name = yield from self.run_of(_NAME, MAX_NAME_CHARS)
        self.check_name(name)
        yield from self.expect(_SEPARATOR)
        marker = yield from self.arguments(name, _END)
        return marker or (yield from self.accept(_CALL_END))


class DeepseekV3Parser(DeepseekV31Parser):
    def _call(self) -> Steps[str | None]:
        yield from self.run_of(_NAME, MAX_NAME_CHARS)  # "function"
        yield from self.expect(_SEPARATOR)
        name = yield from self.run_of(_NAME, MAX_NAME_CHARS)
        self.check_name(name)
        yield from self.expect("```json")
        yield from self.skip_space()
        marker = yield from self.arguments(name, _FENCED_END)
        if marker is not None:
            return marker
        yield from self.accept("```")
        return (yield from self.accept(_CALL_END))
