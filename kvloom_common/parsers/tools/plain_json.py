"""JSON without markers, as models write it that are told to, and as demanded calls come out of a guide:

    {"name": "get_weather", "arguments": {"city": "Paris"}}
    [{"name": "get_weather", "parameters": {"city": "Paris"}}, {"name": "get_time", "parameters": {}}]

Calls stand at the beginning of the output; what follows the object or array is text.
"""

from __future__ import annotations

from typing import ClassVar

from kvloom_common.parsers.core.json_call import JsonCallParser
from kvloom_common.parsers.core.text_input import Malformed, Steps


class PlainJsonParser(JsonCallParser):
    markers: ClassVar[tuple[str, ...]] = ()

    def grammar(self) -> Steps[None]:
        self.hold()
        yield from self.attempt(self._calls())
        yield from self.pass_text()

    def _calls(self) -> Steps[None]:
        yield from self.calls()


class DemandedCallParser(PlainJsonParser):
    """Parses an answer that has room for calls only. A call that is cut off before it has begun is no text: the caller
    has asked for none, and would take the beginning of the JSON for the answer."""

    _reads_calls = True

    def _calls(self) -> Steps[None]:
        try:
            yield from super()._calls()
        except Malformed:
            self._reads_calls = False
            raise
        self._reads_calls = False

    def _release_rest(self) -> None:
        if self._reads_calls:
            self.drop()
            self.position = len(self.text)
        super()._release_rest()
