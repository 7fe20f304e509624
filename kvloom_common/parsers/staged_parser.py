"""A reasoning parser whose text a tool parser reads."""

from __future__ import annotations

from collections.abc import Iterable

from kvloom_common.parsers.events import Event, TextDelta
from kvloom_common.parsers.spec import OutputParser


class StagedParser:
    """Reasoning comes first: once the reasoning parser lets text pass, it lets all of it pass, and the tool parser sees
    that text as a whole output."""

    __slots__ = ("_reasoning", "_tools")

    def __init__(self, reasoning: OutputParser, tools: OutputParser) -> None:
        self._reasoning = reasoning
        self._tools = tools

    @property
    def num_tool_calls(self) -> int:
        return self._tools.num_tool_calls

    def feed(self, text: str) -> list[Event]:
        return self._through_tools(self._reasoning.feed(text))

    def finish(self) -> list[Event]:
        events = self._through_tools(self._reasoning.finish())
        events.extend(self._tools.finish())
        return events

    def _through_tools(self, events: Iterable[Event]) -> list[Event]:
        through: list[Event] = []
        for event in events:
            if isinstance(event, TextDelta):
                through.extend(self._tools.feed(event.text))
            else:
                through.append(event)
        return through
