"""Collects events, with neighbours of one kind joined."""

from __future__ import annotations

from kvloom_common.parsers.events import Event, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallEnd, ToolCallStart


class EventBuffer:
    """The events since the last `take`. `num_tool_calls` counts the calls that have begun."""

    __slots__ = ("_events", "_kind", "_pieces", "call_open", "num_tool_calls")

    def __init__(self) -> None:
        self.num_tool_calls = 0
        self.call_open = False
        self._events: list[Event] = []
        self._kind = ""
        self._pieces: list[str] = []

    def text(self, piece: str) -> None:
        self._add("text", piece)

    def reasoning(self, piece: str) -> None:
        self._add("reasoning", piece)

    def arguments(self, piece: str) -> None:
        self._add("arguments", piece)

    def start(self, name: str) -> None:
        self._join()
        self._events.append(ToolCallStart(self.num_tool_calls, name))
        self.num_tool_calls += 1
        self.call_open = True

    def end(self) -> None:
        self._join()
        self._events.append(ToolCallEnd(self.num_tool_calls - 1))
        self.call_open = False

    def take(self) -> list[Event]:
        self._join()
        events, self._events = self._events, []
        return events

    def _add(self, kind: str, piece: str) -> None:
        if not piece:
            return
        if kind != self._kind:
            self._join()
            self._kind = kind
        self._pieces.append(piece)

    def _join(self) -> None:
        if not self._pieces:
            return
        text = "".join(self._pieces)
        self._pieces.clear()
        if self._kind == "text":
            self._events.append(TextDelta(text))
        elif self._kind == "reasoning":
            self._events.append(ReasoningDelta(text))
        else:
            self._events.append(ToolCallArguments(self.num_tool_calls - 1, text))
