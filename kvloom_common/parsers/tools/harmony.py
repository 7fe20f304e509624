"""gpt-oss (OpenAI's harmony format): messages in channels.

    <|channel|>analysis<|message|>The user asks ...<|end|><|start|>assistant<|channel|>commentary
    to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>
    <|channel|>final<|message|>It rains.<|return|>

(without the line breaks). `analysis` is reasoning, `final` and `commentary` are text, a message `to=functions.NAME` is
a call; the recipient may also stand before the channel. Bodies are verbatim, with their whitespace. The prompt ends
with `<|start|>assistant`. Source: https://cookbook.openai.com/articles/openai-harmony.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Final

from kvloom_common.parsers.core.json_call import JsonCallParser
from kvloom_common.parsers.core.text_input import Malformed, Markers, Steps
from kvloom_common.parsers.spec import ToolSchema

MAX_HEADER_CHARS: Final = 512

_CHANNEL: Final = "<|channel|>"
_START: Final = "<|start|>"
_ENDS: Final = ("<|end|>", "<|return|>", "<|call|>")
_HEADERS: Final = Markers(_START, _CHANNEL)
_BODY_END: Final = Markers(*_ENDS, _START, _CHANNEL)
_HEADER_TEXT: Final = re.compile(r"[^<]+")
_HEADER: Final = re.compile(
    r"(?:assistant)?\s*(?:to=(?P<first>[^\s<]+))?\s*"
    r"<\|channel\|>\s*(?P<channel>[a-z]+)\s*(?:to=(?P<second>[^\s<]+))?\s*(?:<\|constrain\|>)?\s*[^\s<]*\s*"
)


class HarmonyParser(JsonCallParser):
    markers: ClassVar[tuple[str, ...]] = (_START, _CHANNEL, "<|message|>", "<|constrain|>", *_ENDS)
    pairs: ClassVar[Mapping[str, Markers]] = {f"{_CHANNEL}analysis": Markers(f"{_CHANNEL}final<|message|>")}
    """Where the reasoning at the beginning of an answer begins, and where the answer itself does."""

    def __init__(self, tools: Sequence[ToolSchema] = (), *, with_calls: bool = True) -> None:
        self._with_calls = with_calls
        super().__init__(tools)

    def grammar(self) -> Steps[None]:
        self.hold()
        marker: str | None = yield from self.accept("to=", _CHANNEL, _START)
        while True:
            if marker not in (_CHANNEL, _START, "to="):
                marker = yield from self._outside()
            self._next: str | None = None
            yield from self.attempt(self._message(marker))
            marker = self._next

    def _outside(self) -> Steps[str]:
        """Between messages there should be nothing; what there is, is text."""
        self.drop()
        marker = yield from self.until(_HEADERS, self.emit_text)
        self._hold_marker(marker)
        return marker

    def _hold_marker(self, marker: str) -> None:
        self.hold()
        self.held.append(marker)

    def _message(self, marker: str) -> Steps[None]:
        header = yield from self._header("" if marker == _START else marker)
        match = _HEADER.fullmatch(header)
        if match is None:
            raise Malformed
        recipient = match["first"] or match["second"]
        channel = match["channel"]
        if recipient is not None and self._with_calls:
            yield from self._call(recipient.removeprefix("functions."))
        elif channel == "analysis":
            yield from self._body(self.events.reasoning)
        elif channel in ("final", "commentary"):
            yield from self._body(self.emit_text)
        else:
            raise Malformed

    def _header(self, header: str) -> Steps[str]:
        """Reads the header up to `<|message|>`, which is consumed."""
        while True:
            header += yield from self.run_of(_HEADER_TEXT, MAX_HEADER_CHARS)
            marker = yield from self.expect("<|message|>", _CHANNEL, "<|constrain|>", max_space=0)
            if marker == "<|message|>":
                return header
            header += marker
            if len(header) > MAX_HEADER_CHARS:
                raise Malformed

    def _call(self, name: str) -> Steps[None]:
        self.check_name(name)
        yield from self.skip_space()
        if (yield from self.accept("<|call|>")) is not None:
            self.commit(name)
            self.events.arguments("{}")
            self.end_call()
            return
        marker = yield from self.arguments(name, _BODY_END)
        if marker is None:
            marker = yield from self.accept(*_ENDS)
        self._continue(marker)

    def _body(self, emit: Callable[[str], None]) -> Steps[None]:
        self.drop()
        marker = yield from self.until(_BODY_END, emit)
        self._continue(marker)

    def _continue(self, marker: str | None) -> None:
        """A new header may follow without the end of the last message."""
        if marker in (_START, _CHANNEL):
            self._next = marker
