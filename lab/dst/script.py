"""The answers of simulated sequences: tokens and text are pure functions of a request's key."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from tools.stable_hash import stable_hash

BLOCKED_WORD = "blocked"
"""The safety service blocks a prompt with this word."""
HALTED_TOKEN = 13
"""The safety service halts an answer with this token."""
MAX_ANSWER_TOKENS = 28


@dataclasses.dataclass(frozen=True, slots=True)
class ScriptedSampling:
    """Takes the place of the sampling parameters of a request, which the core never reads."""

    script_key: str
    wants_logprobs: bool = False


@functools.lru_cache(maxsize=4096)
def answer(script_key: str, index: int) -> tuple[int, ...]:
    """The whole answer if no limit cuts it off. Its tokens are below 100."""
    length = 1 + stable_hash(script_key, index, "length") % MAX_ANSWER_TOKENS
    tokens: list[int] = []
    for part in range(-(-length // 8)):
        tokens += (byte * 100 >> 8 for byte in stable_hash(script_key, index, part).to_bytes(8, "little"))
    return tuple(tokens[:length])


@functools.lru_cache(maxsize=4096)
def answer_text(script_key: str, index: int) -> str:
    """The text of the whole answer; the text of its first tokens is a prefix."""
    return text_of(answer(script_key, index))


def text_of(tokens: Sequence[int]) -> str:
    return "".join(f"{token} " for token in tokens)


def text_shown(tokens: Sequence[int], count: int, *, is_final: bool = False) -> str:
    """The text that a detokenizer returns after `count` tokens. A token that is a multiple of 5 is held back until the
    next one, as an incomplete character would be."""
    if count and not is_final and tokens[count - 1] % 5 == 0:
        count -= 1
    return text_of(tokens[:count])
