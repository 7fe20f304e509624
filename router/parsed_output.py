"""The output of an answer's choices, taken apart into text, reasoning and tool calls."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from kvloom.v1 import router_service_pb2
from kvloom.v1.generation_pb2 import FINISH_REASON_ERROR, FINISH_REASON_STOP, FINISH_REASON_TOOL_CALLS
from kvloom.v1.router_service_pb2 import ChoiceDelta, OutputForm, OutputPart
from kvloom_common.conversation.model_output import parser_of, tool_call_id
from kvloom_common.parsers import registry
from kvloom_common.parsers.events import Event, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from kvloom_common.parsers.output_parser import holds_back, make_parser
from kvloom_common.parsers.spec import OutputParser, ParserSpec, ToolSchema
from kvloom_common.text.detokenizer import IncrementalDetokenizer
from kvloom_common.text.tokenizer import ModelTokenizer
from router.core.events import ChoiceSpec

MAX_UNREAD: Final = 256
"""So many deltas are parsed together, at most."""


class ParsedCalls:
    """Finds the calls in the output of one choice. It is a CallReader of the core."""

    def __init__(self, parser: OutputParser, openers: str = "") -> None:
        """`openers`: behind text, the first call begins with one of these characters; "": with any."""
        self._parser = parser
        self._opener = re.compile(f"[{re.escape(openers)}]") if openers else None
        self._is_open = False
        self._is_inside = True  # the beginning of an output may be that of a call, whatever it is
        self._unread: list[str] = []
        """Text in which no call begins: parsing it takes many times as long as looking for an opener."""

    def read(self, delta: str) -> tuple[bool, bool]:
        unread = self._unread
        if not self._is_inside and self._opener is not None and self._opener.search(delta) is None:
            unread.append(delta)
            if len(unread) < MAX_UNREAD:
                return False, False
            delta = ""
        if unread:
            delta = "".join(unread) + delta
            unread.clear()
        has_begun = False
        for event in self._parser.feed(delta):
            if isinstance(event, ToolCallStart):
                self._is_open = has_begun = True
                self._opener = None  # the next one of a list of calls has none
            elif isinstance(event, ToolCallEnd):
                self._is_open = False
        self._is_inside = self._is_open or holds_back(self._parser)
        return self._is_inside, has_begun


def call_reader(
    form: OutputForm, tokenizer: ModelTokenizer | None, shown_special_token_ids: Sequence[int], choice: ChoiceSpec
) -> ParsedCalls:
    """The reader for what follows on the choice's delivered output."""
    reader = ParsedCalls(parser_of(form), registry.openers("json" if form.only_calls else form.tools))
    if tokenizer is not None and choice.num_delivered_chars:
        reader.read(_delivered_text(choice, tokenizer, shown_special_token_ids))
    return reader


def _delivered_text(choice: ChoiceSpec, tokenizer: ModelTokenizer, shown_special_token_ids: Sequence[int]) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, shown_special_token_ids=shown_special_token_ids)
    return detokenizer.push(choice.output_token_ids)[: choice.num_delivered_chars]


class ParsedOutput:
    """A parser for each choice of one answer."""

    def __init__(self, request_id: str, spec: ParserSpec, tools: Sequence[ToolSchema]) -> None:
        """`request_id` is the one that the client knows: the ids of tool calls follow from it."""
        self._request_id = request_id
        self._spec = spec
        self._tools = tools
        self._parsers: dict[int, OutputParser] = {}
        self._num_chars: dict[int, int] = {}

    def restore(
        self, choices: Sequence[ChoiceSpec], tokenizer: ModelTokenizer, shown_special_token_ids: Sequence[int]
    ) -> None:
        """Bring the parsers to where those of another router were when the client received its last update."""
        for choice in choices:
            if choice.num_delivered_chars:
                self._parser(choice.index).feed(_delivered_text(choice, tokenizer, shown_special_token_ids))
                self._num_chars[choice.index] = choice.num_delivered_chars

    def parse(self, deltas: Sequence[ChoiceDelta]) -> None:
        """Replace the text of the updates by what the parsers find in it."""
        for delta in deltas:
            parser = self._parser(delta.index)
            raw = delta.text
            events = parser.feed(raw) if raw else []
            if delta.HasField("finish") and delta.finish.reason != FINISH_REASON_ERROR:
                # After an error another router may continue, whose parser still holds back what this one does.
                events = [*events, *parser.finish()]
                if parser.num_tool_calls and delta.finish.reason == FINISH_REASON_STOP:
                    delta.finish.reason = FINISH_REASON_TOOL_CALLS
            self._num_chars[delta.index] = num_chars = self._num_chars.get(delta.index, 0) + len(raw)
            delta.num_delivered_chars = num_chars
            delta.text = "".join(event.text for event in events if isinstance(event, TextDelta))
            if not all(isinstance(event, TextDelta) for event in events):
                delta.output.extend(self._part(delta.index, event) for event in events)

    def _parser(self, index: int) -> OutputParser:
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = make_parser(self._spec, self._tools)
        return parser

    def _part(self, choice: int, event: Event) -> OutputPart:
        if isinstance(event, TextDelta):
            return OutputPart(text=event.text)
        if isinstance(event, ReasoningDelta):
            return OutputPart(reasoning=event.text)
        if isinstance(event, ToolCallArguments):
            arguments = router_service_pb2.ToolCallArguments(index=event.index, text=event.text)
            return OutputPart(tool_call_arguments=arguments)
        if isinstance(event, ToolCallStart):
            call_id = tool_call_id(self._request_id, choice, event.index)
            start = router_service_pb2.ToolCallStart(index=event.index, id=call_id, name=event.name)
            return OutputPart(tool_call_start=start)
        return OutputPart(tool_call_end=router_service_pb2.ToolCallEnd(index=event.index))
