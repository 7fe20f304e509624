"""`make_parser`: the parser for a model's output, by the names of its families."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvloom_common.parsers.events import Event, TextDelta
from kvloom_common.parsers.spec import OutputParser, ParserSpec, ToolSchema

__all__ = ["OutputParser", "ParserSpec", "PlainParser", "ToolSchema", "holds_back", "make_parser"]


class PlainParser:
    """All of the output is text."""

    num_tool_calls = 0
    holds_back = False

    def feed(self, text: str) -> list[Event]:
        return [TextDelta(text)] if text else []

    def finish(self) -> list[Event]:
        return []


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

    @property
    def holds_back(self) -> bool:
        return holds_back(self._reasoning) or holds_back(self._tools)

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


def holds_back(parser: OutputParser) -> bool:
    """OutputParser.holds_back, which plugins' parsers may lack."""
    return getattr(parser, "holds_back", True)


def make_parser(spec: ParserSpec, tools: Sequence[ToolSchema] = ()) -> OutputParser:
    """The parser of these families. With `tools`, a call of any other name stays text; without, every name is a tool.
    Raises ValueError for a family that does not exist."""
    # Loaded here: a fabric that parses nothing needs neither the registry nor a family.
    from kvloom_common.parsers import registry

    if spec.only_calls:
        from kvloom_common.parsers.tools.json_calls import DemandedCallParser

        return DemandedCallParser(tools)
    if spec.tools == "harmony" or spec.reasoning == "harmony":
        if spec.tools not in (None, "", "harmony") or spec.reasoning not in (None, "", "harmony"):
            raise ValueError("harmony's channels hold reasoning and calls: it cannot be combined with another family.")
        return registry.harmony_parser(tools, with_calls=bool(spec.tools))
    tool_parser = registry.tool_family(spec.tools)(tools) if spec.tools else None
    if not spec.reasoning:
        return tool_parser or PlainParser()
    reasoning = registry.reasoning_family(spec.reasoning)(spec.starts_in_reasoning)
    if tool_parser is None:
        return reasoning
    return StagedParser(reasoning, tool_parser)
