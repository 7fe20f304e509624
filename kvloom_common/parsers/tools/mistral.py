"""Mistral's models, in the form of tokenizers up to v7, and in the later one:

    [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "aBcDeFgH1"}]
    [TOOL_CALLS]get_weather[CALL_ID]aBcDeFgH1[ARGS]{"city": "Paris"}[TOOL_CALLS]get_time[ARGS]{}

`[CALL_ID]` and its id, and even `[ARGS]`, may be missing. Sources: https://github.com/mistralai/mistral-common and the
chat templates of mistralai/Mistral-7B-Instruct-v0.3 and mistralai/Mistral-Small-3.2-24B-Instruct-2506.
"""

from __future__ import annotations

import re
from typing import ClassVar, Final

from kvloom_common.parsers.core.json_call import MAX_NAME_CHARS, JsonCallParser
from kvloom_common.parsers.core.markers import Markers
from kvloom_common.parsers.core.text_input import Steps

_START: Final = Markers("[TOOL_CALLS]")
_NAME: Final = re.compile(r"[A-Za-z0-9_.\-]+")


class MistralParser(JsonCallParser):
    markers: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    def grammar(self) -> Steps[None]:
        while True:
            yield from self.text_until(_START)
            yield from self.attempt(self._calls())

    def _calls(self) -> Steps[None]:
        yield from self.skip_space()
        if (yield from self.peek()) in "[{":
            yield from self.calls()
            return
        name = yield from self.run_of(_NAME, MAX_NAME_CHARS)
        self.check_name(name)
        if (yield from self.accept("[ARGS]", "[CALL_ID]")) == "[CALL_ID]":
            yield from self.run_of(_NAME, MAX_NAME_CHARS)
            yield from self.expect("[ARGS]")
        yield from self.arguments(name)
