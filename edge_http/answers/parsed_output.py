"""The output of one choice, taken apart into text, reasoning and tool calls while it is generated."""

from __future__ import annotations

from edge_http.formatting.response_formatter import ChoiceFinish
from kvloom_common.parsers.events import Event
from kvloom_common.parsers.reasoning_tally import ReasoningTally
from kvloom_common.parsers.spec import OutputParser


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
