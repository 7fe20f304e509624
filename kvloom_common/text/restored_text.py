"""Puts placeholders in the place of texts, and texts back in the place of placeholders, in text that arrives in
pieces.

Variables in the templates of stored prompts: `{{name}}`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from kvloom.v1.safety_service_pb2 import Mask


def with_placeholders(text: str, masks: Iterable[Mask]) -> str:
    """`masks` are in order."""
    pieces: list[str] = []
    end = 0
    for mask in masks:
        pieces += (text[end : mask.start], mask.placeholder)
        end = mask.end
    return "".join((*pieces, text[end:]))


class RestoredText:
    """Withholds only what may be the beginning of a placeholder. What was put back is not searched again."""

    def __init__(self, originals: Mapping[str, str]) -> None:
        """`originals`: the texts, at least one, by their placeholders."""
        self._originals = originals
        self._expression = re.compile("|".join(map(re.escape, originals)))
        self._firsts = {placeholder[0] for placeholder in originals}
        self._longest = max(map(len, originals))
        self._kept = ""

    def feed(self, text: str) -> str:
        """Return the text that may be shown now."""
        text = self._kept + text
        pieces: list[str] = []
        end = 0
        for match in self._expression.finditer(text):
            pieces += (text[end : match.start()], self._originals[match[0]])
            end = match.end()
        cut = self._beginning(text, max(end, len(text) - self._longest + 1))
        self._kept = text[cut:]
        return "".join((*pieces, text[end:cut]))

    def finish(self) -> str:
        """Return the rest, when no more text will come."""
        kept, self._kept = self._kept, ""
        return kept

    def _beginning(self, text: str, start: int) -> int:
        """Where the first placeholder begins that the text may end in the middle of; its length if there is none."""
        for at in range(start, len(text)):
            if text[at] in self._firsts and any(each.startswith(text[at:]) for each in self._originals):
                return at
        return len(text)


VARIABLE: Final = re.compile(r"\{\{\s*([A-Za-z_][A-Za-z0-9_]{0,63})\s*\}\}")
