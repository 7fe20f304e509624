"""Magistral:

    [THINK]The user asks ...[/THINK]It rains.

Source: the chat template of mistralai/Magistral-Small-2509.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from kvloom_common.parsers.core.markers import Markers
from kvloom_common.parsers.reasoning.marked import MarkedReasoningParser


class MistralReasoningParser(MarkedReasoningParser):
    markers: ClassVar[tuple[str, ...]] = ("[THINK]", "[/THINK]")
    pairs: ClassVar[Mapping[str, Markers]] = {"[THINK]": Markers("[/THINK]")}
