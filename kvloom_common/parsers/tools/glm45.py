"""GLM 4.5 to 4.7:

    <tool_call>get_weather
    <arg_key>city</arg_key>
    <arg_value>Paris</arg_value>
    </tool_call>

GLM 4.7 writes it without line breaks. Strings are bare, other values are JSON. Source: the chat templates of
zai-org/GLM-4.5 and zai-org/GLM-4.7.
"""

from __future__ import annotations

import re
from typing import ClassVar, Final

from kvloom_common.parsers.core.json_call import MAX_NAME_CHARS
from kvloom_common.parsers.core.text_input import Markers, Steps
from kvloom_common.parsers.core.typed_value import TypedValueParser

_START: Final = Markers("<tool_call>")
_VALUE_END: Final = Markers("</arg_value>")
_NAME: Final = re.compile(r"[^<>\s{}\"]+")
_KEY: Final = re.compile(r"[^<>]+")


class Glm45Parser(TypedValueParser):
    markers: ClassVar[tuple[str, ...]] = (
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    )

    def grammar(self) -> Steps[None]:
        while True:
            yield from self.text_until(_START)
            yield from self.attempt(self._call())

    def _call(self) -> Steps[None]:
        yield from self.skip_space()
        name = yield from self.run_of(_NAME, MAX_NAME_CHARS)
        self.check_name(name)
        marker = yield from self.expect("<arg_key>", "</tool_call>")
        self.begin_arguments(name)
        while marker == "<arg_key>":
            self.hold()
            key = yield from self.run_of(_KEY, MAX_NAME_CHARS)
            yield from self.expect("</arg_key>")
            yield from self.expect("<arg_value>")
            self.drop()
            yield from self.argument(key.strip(), _VALUE_END)
            self.hold()
            marker = yield from self.accept("<arg_key>", "</tool_call>")
        self.end_call()
