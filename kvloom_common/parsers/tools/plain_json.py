"""JSON without markers, as models write it that are told to, and as forced calls come out of a guide:

    {"name": "get_weather", "arguments": {"city": "Paris"}}
    [{"name": "get_weather", "parameters": {"city": "Paris"}}, {"name": "get_time", "parameters": {}}]

Calls stand at the beginning of the output; what follows the object or array is text.
"""

from __future__ import annotations

from typing import ClassVar

from kvloom_common.parsers.core.json_call import JsonCallParser
from kvloom_common.parsers.core.text_input import Steps


class PlainJsonParser(JsonCallParser):
    markers: ClassVar[tuple[str, ...]] = ()

    def grammar(self) -> Steps[None]:
        self.hold()
        yield from self.attempt(self._calls())
        yield from self.pass_text()

    def _calls(self) -> Steps[None]:
        yield from self.calls()
