"""Reasoning between two markers, at the beginning of the output.

Whitespace next to the markers belongs to them. Markers that come later are text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from kvloom_common.parsers.core.grammar_parser import GrammarParser
from kvloom_common.parsers.core.markers import Markers
from kvloom_common.parsers.core.text_input import Steps


class MarkedReasoningParser(GrammarParser):
    """The base of the families of reasoning."""

    pairs: ClassVar[Mapping[str, Markers]] = {}
    """The markers that begin the reasoning, and those that end it. The first pair is that of prompts that end inside
    the reasoning."""

    begins_inside: ClassVar[bool] = False
    """True when every output begins inside the reasoning, whatever the prompt."""

    def __init__(self, starts_in_reasoning: bool = False) -> None:
        self._starts_in_reasoning = starts_in_reasoning
        self.opening: str | None = None
        super().__init__()

    def grammar(self) -> Steps[None]:
        self.hold()
        self.opening = yield from self.accept(*self.pairs)
        self.drop()
        if self.opening is None and not self._starts_in_reasoning:
            yield from self.pass_text()
        yield from self.skip_space()
        end = self.pairs[self.opening or next(iter(self.pairs))]
        yield from self.until(end, self.events.reasoning, with_space=True)
        yield from self.skip_space()
        yield from self.answer()

    def answer(self) -> Steps[None]:
        """Parses what follows the reasoning."""
        yield from self.pass_text()
