"""Tokens that encode the time, from which `kvloom-lab bench data-plane` computes a token's latency through the fabric.

With `shard.sim.stamp_tokens`, a sequence's first token encodes how long the engine had the request, and every later one
the time at which it was made: the word's index in the list of words below, in ticks, modulo the list's length.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

TICK_SECONDS: Final = 20e-6
NUM_STAMPS: Final = 16_384
"""A stamp encodes a time modulo this many ticks, a third of a second."""
_WORD: Final = re.compile(r" [a-z]{2,12}")


def stamp_token_ids(token_texts: Sequence[str | None]) -> tuple[int, ...]:
    """The first NUM_STAMPS tokens that are a space and a plain word, with distinct texts. Raises ValueError when the
    vocabulary has fewer."""
    found: dict[str, int] = {}
    for token_id, text in enumerate(token_texts):
        if text and _WORD.fullmatch(text):
            found.setdefault(text, token_id)
            if len(found) == NUM_STAMPS:
                return tuple(found.values())
    raise ValueError(f"the vocabulary has only {len(found)} plain words, stamps need {NUM_STAMPS}")


def stamp_of(seconds: float) -> int:
    """The index in the list that encodes a point in time or a duration."""
    return int(seconds / TICK_SECONDS) % NUM_STAMPS


def seconds_since(stamp: int, now: float) -> float:
    """How many seconds before `now` a token with this stamp was made, modulo the list's length."""
    return ((now / TICK_SECONDS) - stamp) % NUM_STAMPS * TICK_SECONDS
