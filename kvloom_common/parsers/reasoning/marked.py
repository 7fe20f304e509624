"""Reasoning between two markers, at the beginning of the output: the base of the families, and the families.

Whitespace next to the markers belongs to them. Markers that come later are text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final

from kvloom_common.parsers.core.grammar_parser import GrammarParser
from kvloom_common.parsers.core.text_input import Markers, Steps

_RESPONSE: Final = Markers("Here is my response:", "Here's my response:")
_RESPONSE_END: Final = Markers("</response>")


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


class ThinkParser(MarkedReasoningParser):
    """DeepSeek R1, Qwen 3 and many others:

        <think>
        The user asks ...
        </think>

        It rains.

    Sources: the chat templates of deepseek-ai/DeepSeek-R1 and Qwen/Qwen3-8B.
    """

    markers: ClassVar[tuple[str, ...]] = ("<think>", "</think>")
    pairs: ClassVar[Mapping[str, Markers]] = {"<think>": Markers("</think>")}


class DeepseekR1ReasoningParser(ThinkParser):
    """Always starts inside the reasoning: DeepSeek R1's prompt ends with `<think>`, so that the output has only the
    end."""

    begins_inside: ClassVar[bool] = True

    def __init__(self, _starts_in_reasoning: bool = True) -> None:
        super().__init__(True)


class GraniteReasoningParser(MarkedReasoningParser):
    """Granite 3.2, and Granite 3.3:

        Here is my thought process: The user asks ... Here is my response: It rains.
        <think>The user asks ...</think><response>It rains.</response>

    "Here's" is accepted for "Here is". Source: the chat templates of ibm-granite/granite-3.2-8b-instruct and -3.3-.
    """

    markers: ClassVar[tuple[str, ...]] = ("<think>", "</think>", "<response>", "</response>")
    pairs: ClassVar[Mapping[str, Markers]] = {
        "<think>": Markers("</think>"),
        "Here is my thought process:": _RESPONSE,
        "Here's my thought process:": _RESPONSE,
    }

    def answer(self) -> Steps[None]:
        if self.opening in (None, "<think>") and (yield from self.accept("<response>")) is not None:
            yield from self.skip_space()
            yield from self.until(_RESPONSE_END, self.emit_text, with_space=True)
        yield from self.pass_text()


class KimiReasoningParser(MarkedReasoningParser):
    """Kimi-VL, Kimi-Dev and Kimi K2 Thinking:

        ◁think▷The user asks ...◁/think▷It rains.
        <think>The user asks ...</think>It rains.

    Sources: the chat templates of moonshotai/Kimi-VL-A3B-Thinking-2506 and moonshotai/Kimi-K2-Thinking.
    """

    markers: ClassVar[tuple[str, ...]] = ("◁think▷", "◁/think▷", "<think>", "</think>")
    pairs: ClassVar[Mapping[str, Markers]] = {"◁think▷": Markers("◁/think▷"), "<think>": Markers("</think>")}


class MistralReasoningParser(MarkedReasoningParser):
    """Magistral: `[THINK]The user asks ...[/THINK]It rains.` Source: the chat template of
    mistralai/Magistral-Small-2509."""

    markers: ClassVar[tuple[str, ...]] = ("[THINK]", "[/THINK]")
    pairs: ClassVar[Mapping[str, Markers]] = {"[THINK]": Markers("[/THINK]")}
