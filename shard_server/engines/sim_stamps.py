"""Tokens that tell the time: what `kvloom bench data-plane` reads a token's way through the fabric from.

With `shard.sim.stamp_tokens` a sequence's first token says how long the engine had the request, and every later one
when it was made: the word's place in the list of words below, in ticks, modulo the list's length.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

TICK_SECONDS: Final = 20e-6
NUM_STAMPS: Final = 16_384
"""A stamp means a time up to multiples of this many ticks: a third of a second."""
_WORD: Final = re.compile(r" [a-z]{2,12}")


def stamp_token_ids(token_texts: Sequence[str | None]) -> tuple[int, ...]:
    """The first tokens that are a space and a plain word, each of another text; as many as there are stamps. Raises
    ValueError when the vocabulary has fewer."""
    found: dict[str, int] = {}
    for token_id, text in enumerate(token_texts):
        if text and _WORD.fullmatch(text):
            found.setdefault(text, token_id)
            if len(found) == NUM_STAMPS:
                return tuple(found.values())
    raise ValueError(f"the vocabulary has only {len(found)} plain words, stamps need {NUM_STAMPS}")


def stamp_of(seconds: float) -> int:
    """The place in the list that stands for a point of time or a duration."""
    return int(seconds / TICK_SECONDS) % NUM_STAMPS


def seconds_since(stamp: int, now: float) -> float:
    """How long before `now` a token with this stamp was made, up to multiples of the list's length."""
    return ((now / TICK_SECONDS) - stamp) % NUM_STAMPS * TICK_SECONDS
