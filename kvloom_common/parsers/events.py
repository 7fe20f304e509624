"""An output parser turns a model's text into these events.

Counts tokens of reasoning by what a parser finds in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A tool call begins. Calls are numbered from 0; one ends before the next begins."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of a call's arguments, as JSON text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The call has all of its arguments, or as many as the output had."""

    index: int


Event = TextDelta | ReasoningDelta | ToolCallStart | ToolCallArguments | ToolCallEnd


def merge(events: list[Event]) -> list[Event]:
    """The events with neighbours of one kind joined. Two outputs are the same when these are equal."""
    merged: list[Event] = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(event, TextDelta) and isinstance(last, TextDelta):
            merged[-1] = TextDelta(last.text + event.text)
        elif isinstance(event, ReasoningDelta) and isinstance(last, ReasoningDelta):
            merged[-1] = ReasoningDelta(last.text + event.text)
        elif isinstance(event, ToolCallArguments) and isinstance(last, ToolCallArguments):
            merged[-1] = ToolCallArguments(last.index, last.text + event.text)
        else:
            merged.append(event)
    return merged


class ReasoningTally:
    """Counts the reasoning tokens of one choice."""

    __slots__ = ("_is_reasoning", "num_tokens")

    def __init__(self, *, starts_in_reasoning: bool = False) -> None:
        self._is_reasoning = starts_in_reasoning
        self.num_tokens = 0
        """Tokens that brought only reasoning, or nothing while reasoning was the last thing that was found."""

    def add(self, events: Sequence[Event], num_tokens: int) -> None:
        """So many tokens brought these events."""
        if events:
            only_reasoning = all(isinstance(event, ReasoningDelta) for event in events)
            self.num_tokens += num_tokens if only_reasoning else 0
            self._is_reasoning = isinstance(events[-1], ReasoningDelta)
        elif self._is_reasoning:
            self.num_tokens += num_tokens

    def is_mixed(self, events: Sequence[Event]) -> bool:
        """True when some of the tokens that brought these events may be reasoning, and others not."""
        return any(isinstance(event, ReasoningDelta) is not self._is_reasoning for event in events)
