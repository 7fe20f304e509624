"""An output parser turns a model's text into these events."""

from __future__ import annotations

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
