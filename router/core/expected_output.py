"""How long the answers of a key usually are, by model: a mean that forgets."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

FIRST_GUESS: Final = 256
"""Tokens of one choice, before any answer was seen."""
WEIGHT: Final = 0.1
"""The weight of the latest answer in the mean."""
MAX_KNOWN: Final = 16_384
"""Keys and models that are remembered; the least recently used ones are forgotten."""


class ExpectedOutput:
    def __init__(self) -> None:
        self._means: OrderedDict[tuple[str, str], float] = OrderedDict()

    def tokens(self, key_id: str, model: str) -> int:
        """Returns the expected number of output tokens of one choice."""
        mean = self._means.get((key_id, model))
        return FIRST_GUESS if mean is None else max(1, round(mean))

    def learn(self, key_id: str, model: str, num_tokens: float) -> None:
        """An answer has ended; `num_tokens` are those of one choice."""
        name = (key_id, model)
        mean = self._means.pop(name, None)
        self._means[name] = num_tokens if mean is None else mean + WEIGHT * (num_tokens - mean)
        if len(self._means) > MAX_KNOWN:
            self._means.popitem(last=False)
