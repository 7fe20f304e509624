"""The output of one choice, taken apart into text, reasoning and tool calls while it is generated."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from edge_http.formatting.response_formatter import ChoiceFinish
from kvloom_common.json_schema.schema_check import conforms
from kvloom_common.parsers.events import Event, ReasoningTally, ToolCallArguments, ToolCallEnd, ToolCallStart
from kvloom_common.parsers.spec import OutputParser, ToolSchema


class CountedOutputParser:
    """A parser, and the count of what it found."""

    __slots__ = ("_parser", "_tally")

    def __init__(self, parser: OutputParser, *, starts_in_reasoning: bool = False) -> None:
        self._parser = parser
        self._tally = ReasoningTally(starts_in_reasoning=starts_in_reasoning)

    @property
    def num_reasoning_tokens(self) -> int:
        """The number of reasoning tokens, as far as the updates tell, which may have several tokens each. Routers count
        them where they meter usage."""
        return self._tally.num_tokens

    def feed(self, text: str, num_tokens: int) -> list[Event]:
        events = self._parser.feed(text)
        self._tally.add(events, num_tokens)
        return events

    def finish(self) -> list[Event]:
        """Return what was held back; the output is complete."""
        return self._parser.finish()

    def completed(self, finish: ChoiceFinish) -> ChoiceFinish:
        """The finish of the choice: a model that called tools and then stopped did so to get their results."""
        if self._parser.num_tool_calls and finish.reason == "stop":
            return ChoiceFinish("tool_calls", finish.stop_string)
        return finish


class CheckedOutput(CountedOutputParser):
    """Calls `on_nonconforming` for a whole call whose arguments do not conform to its tool's schema. The client gets it
    all the same: it has seen the beginning, and checks the arguments of tools that are not strict."""

    __slots__ = ("_arguments", "_name", "_on_nonconforming", "_schemas")

    def __init__(self, parser: OutputParser, tools: Sequence[ToolSchema], on_nonconforming: Callable[[], None]) -> None:
        super().__init__(parser)
        self._schemas = {tool.name: tool.parameters for tool in tools}
        self._on_nonconforming = on_nonconforming
        self._name = ""
        self._arguments: list[str] = []

    def feed(self, text: str, num_tokens: int) -> list[Event]:
        events = super().feed(text, num_tokens)
        self._read(events)
        return events

    def finish(self) -> list[Event]:
        events = super().finish()
        self._read(events)
        return events

    def _read(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case ToolCallStart():
                    self._name = event.name
                    self._arguments.clear()
                case ToolCallArguments():
                    self._arguments.append(event.text)
                case ToolCallEnd():
                    self._check()
                case _:
                    pass

    def _check(self) -> None:
        try:
            value = json.loads("".join(self._arguments))
        except (ValueError, RecursionError):
            return  # cut off
        if not conforms(value, self._schemas.get(self._name, True)):
            self._on_nonconforming()
