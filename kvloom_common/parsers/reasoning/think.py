"""DeepSeek R1, Qwen 3 and many others:

    <think>
    The user asks ...
    </think>

    It rains.

DeepSeek R1's prompt ends with `<think>`, so that the output has only the end. Sources: the chat templates of
deepseek-ai/DeepSeek-R1 and Qwen/Qwen3-8B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from kvloom_common.parsers.core.markers import Markers
from kvloom_common.parsers.reasoning.marked import MarkedReasoningParser


class ThinkParser(MarkedReasoningParser):
    markers: ClassVar[tuple[str, ...]] = ("<think>", "</think>")
    pairs: ClassVar[Mapping[str, Markers]] = {"<think>": Markers("</think>")}


class DeepseekR1ReasoningParser(ThinkParser):
    """Always starts inside the reasoning."""

    begins_inside: ClassVar[bool] = True

    def __init__(self, _starts_in_reasoning: bool = True) -> None:
        super().__init__(True)
