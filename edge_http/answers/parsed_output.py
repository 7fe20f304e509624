"""The output of one choice, taken apart into text, reasoning and tool calls while it is generated."""

from __future__ import annotations

from edge_http.formatting.response_formatter import Finish
from kvloom.parsers.events import Event, ReasoningDelta
from kvloom.parsers.spec import OutputParser


class ParsedOutput:
    """A parser, and the count of what it found."""

    __slots__ = ("_is_reasoning", "_parser", "num_reasoning_tokens")

    def __init__(self, parser: OutputParser, *, starts_in_reasoning: bool = False) -> None:
        self._parser = parser
        self._is_reasoning = starts_in_reasoning
        self.num_reasoning_tokens = 0
        """Tokens that brought only reasoning, or nothing while reasoning was the last thing that was found."""

    def feed(self, text: str, num_tokens: int) -> list[Event]:
        events = self._parser.feed(text)
        if events:
            only_reasoning = all(isinstance(event, ReasoningDelta) for event in events)
            self.num_reasoning_tokens += num_tokens if only_reasoning else 0
            self._is_reasoning = isinstance(events[-1], ReasoningDelta)
        elif self._is_reasoning:
            self.num_reasoning_tokens += num_tokens
        return events

    def finish(self) -> list[Event]:
        """Return what was held back; the output is complete."""
        return self._parser.finish()

    def completed(self, finish: Finish) -> Finish:
        """The finish of the choice: a model that called tools and then stopped did so to get their results."""
        if self._parser.num_tool_calls and finish.reason == "stop":
            return Finish("tool_calls", finish.stop_string)
        return finish
