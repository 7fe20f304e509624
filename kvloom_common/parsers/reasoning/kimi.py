"""Kimi-VL, Kimi-Dev and Kimi K2 Thinking:

    ◁think▷The user asks ...◁/think▷It rains.
    <think>The user asks ...</think>It rains.

Sources: the chat templates of moonshotai/Kimi-VL-A3B-Thinking-2506 and moonshotai/Kimi-K2-Thinking.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from kvloom_common.parsers.core.markers import Markers
from kvloom_common.parsers.reasoning.marked import MarkedReasoningParser


class KimiReasoningParser(MarkedReasoningParser):
    markers: ClassVar[tuple[str, ...]] = ("◁think▷", "◁/think▷", "<think>", "</think>")
    pairs: ClassVar[Mapping[str, Markers]] = {"◁think▷": Markers("◁/think▷"), "<think>": Markers("</think>")}
