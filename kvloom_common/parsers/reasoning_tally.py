"""Counts tokens of reasoning by what a parser finds in them."""

from __future__ import annotations

from collections.abc import Sequence

from kvloom_common.parsers.events import Event, ReasoningDelta


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
