"""Granite 3.2, and Granite 3.3:

    Here is my thought process: The user asks ... Here is my response: It rains.
    <think>The user asks ...</think><response>It rains.</response>

"Here's" is accepted for "Here is". Source: the chat templates of ibm-granite/granite-3.2-8b-instruct and -3.3-.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final

from kvloom_common.parsers.core.markers import Markers
from kvloom_common.parsers.core.text_input import Steps
from kvloom_common.parsers.reasoning.marked import MarkedReasoningParser

_RESPONSE: Final = Markers("Here is my response:", "Here's my response:")
_RESPONSE_END: Final = Markers("</response>")


class GraniteReasoningParser(MarkedReasoningParser):
    markers: ClassVar[tuple[str, ...]] = ("<think>", "</think>", "<response>", "</response>")
    pairs: ClassVar[Mapping[str, Markers]] = {
        "<think>": Markers("</think>"),
        "Here is my thought process:": _RESPONSE,
        "Here's my thought process:": _RESPONSE,
    }

    def answer(self) -> Steps[None]:
        if self.opening in (None, "<think>") and (yield from self.accept("<response>")) is not None:
            yield from self.skip_space()
            yield from self.until(_RESPONSE_END, self.emit_text, with_space=True)
        yield from self.pass_text()
