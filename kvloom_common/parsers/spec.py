"""Defines what a parser is, and what describes one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvloom_common.parsers.events import Event


class OutputParser(Protocol):
    """Turns the text of one choice into events. Neither method ever raises, whatever the text."""

    @property
    def num_tool_calls(self) -> int:
        """How many calls have begun."""
        ...

    @property
    def holds_back(self) -> bool:
        """True while some of the text, and not only whitespace, is in no event and may yet become a call. A plugin's
        parser may lack this property; it counts as True."""
        ...

    def feed(self, text: str) -> list[Event]:
        """The events that this text completes. After any text they depend on all text so far, not on how it was
        split: a parser is restored by feeding it what its predecessor got."""
        ...

    def finish(self) -> list[Event]:
        """The output has ended: what was held back comes out, and a call that has not ended ends."""
        ...


@dataclass(frozen=True, slots=True)
class ParserSpec:
    """Names the families that parse a model's output. None (or "") means that there is nothing of that kind to find."""

    tools: str | None = None
    reasoning: str | None = None
    starts_in_reasoning: bool = False
    """The prompt ends inside the reasoning, so that the output has no marker that begins it."""
    only_calls: bool = False
    """A guide leaves no room for text: what is cut off before a call has begun is none."""


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """A tool that the model may call, with the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
