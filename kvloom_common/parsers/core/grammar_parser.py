"""`GrammarParser`: an output parser whose grammar is written as a generator, and the events that it collects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from kvloom_common.parsers.core.text_input import SPACE, EndOfOutput, Malformed, Markers, Steps, TextInput, space_from
from kvloom_common.parsers.events import Event, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from kvloom_common.parsers.spec import ToolSchema


class GrammarParser(TextInput):
    """The base of all families. A subclass writes `grammar`."""

    markers: ClassVar[tuple[str, ...]] = ()
    """The strings that the family must see although they may be special tokens, which detokenizing drops."""

    def __init__(self, tools: Sequence[ToolSchema] = ()) -> None:
        super().__init__()
        self.tools = {tool.name: tool.parameters for tool in tools}
        self.events = EventBuffer()
        self._after_call = False
        self._finished = False
        self._steps = self.grammar()
        next(self._steps)

    @property
    def num_tool_calls(self) -> int:
        return self.events.num_tool_calls

    @property
    def holds_back(self) -> bool:
        return any(piece.strip(SPACE) for piece in self.held) or bool(self.text[self.position :].strip(SPACE))

    def grammar(self) -> Steps[None]:
        """The family's grammar, of which nothing has been read. It ends with the output (EndOfOutput)."""
        raise NotImplementedError

    def feed(self, text: str) -> list[Event]:
        if not text or self._finished:
            return []
        self.push(text)
        next(self._steps)
        return self.events.take()

    def finish(self) -> list[Event]:
        if self._finished:
            return []
        self._finished = True
        self.ended = True
        try:
            next(self._steps)
        except EndOfOutput:
            self._release_rest()
        return self.events.take()

    def _release_rest(self) -> None:
        """The output has ended: what has not become an event is text, but whitespace that follows a call is not."""
        rest = "".join(self.held) + self.text[self.position :]
        follows_call = self._after_call or self.events.call_open
        if self.events.call_open:
            self.events.end()
        if not follows_call or rest.strip(SPACE):
            self.events.text(rest)

    # What grammars are made of.

    def pass_text(self) -> Steps[None]:
        """All that comes is text, but for the whitespace between a call and the end."""
        if self._after_call:
            yield from self.see_past_space()
        while True:
            self.emit_text(self.take(len(self.text) - self.position))
            yield from self.more()

    def emit_text(self, piece: str) -> None:
        if piece:
            self._after_call = False
            self.events.text(piece)

    def until(self, markers: Markers, emit: Callable[[str], None], *, with_space: bool = False) -> Steps[str]:
        """Emit what comes before the next marker, and consume the marker. `with_space`: the whitespace before it is
        part of it. If the output ends first, all of the rest is emitted."""
        while True:
            text = self.text
            match = markers.pattern.search(text, self.position)
            end = markers.undecided_from(text, self.position) if match is None else match.start()
            if with_space:
                end = space_from(text, self.position, end)
            if match is None and self.ended:
                end = len(text)
            if end > self.position:
                emit(text[self.position : end])
                self.position = end
            if match is not None:
                self.take(match.end() - end)
                return match.group()
            if self.ended:
                raise EndOfOutput
            yield

    def text_until(self, markers: Markers) -> Steps[str]:
        """Emit text up to the next marker, which is consumed and held together with the whitespace before it."""
        self.drop()
        while True:
            text = self.text
            match = markers.pattern.search(text, self.position)
            end = markers.undecided_from(text, self.position) if match is None else match.start()
            end = space_from(text, self.position, end)
            if end > self.position:
                self.emit_text(text[self.position : end])
                self.position = end
            if match is not None:
                self.hold()
                self.take(match.end() - end)
                return match.group()
            yield from self.more()

    def attempt(self, steps: Steps[None]) -> Steps[None]:
        """Read what may be calls. What is malformed comes out as text: all that is held."""
        try:
            yield from steps
        except Malformed:
            rest = "".join(self.held)
            if self.events.call_open:
                self.end_call()
            self.emit_text(rest)
        self.drop()

    def check_name(self, name: str) -> None:
        """Raises Malformed for a name that is no tool's."""
        if not name or (self.tools and name not in self.tools):
            raise Malformed

    def commit(self, name: str) -> None:
        """The head is well-formed: the call begins, and what was held is its syntax."""
        self.drop()
        self.events.start(name)

    def end_call(self) -> None:
        """The call has ended. What follows is held until it is understood."""
        self.events.end()
        self._after_call = True
        self.hold()


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
