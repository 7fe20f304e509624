"""What every simulated request will say: tokens, text and length as pure functions of its name."""

from __future__ import annotations

import xxhash

MODEL = "m"
BLOCKED_WORD = "blocked"
HALTED_TOKEN = 13


def number(*parts: object) -> int:
    return xxhash.xxh3_64_intdigest("\0".join(map(str, parts)).encode())


def answer_tokens(request_id: str, index: int, max_tokens: int) -> list[int]:
    """The whole answer; shorter than `max_tokens` when the sequence stops by itself."""
    length = min(max_tokens, 1 + number(request_id, index, "length") % 24)
    return [number(request_id, index, i) % 100 for i in range(length)]


def text_after(tokens: list[int], count: int, *, is_final: bool = False) -> str:
    """Text that a detokenizer shows after `count` tokens: every fifth token's word waits for the next token, as an
    incomplete character would."""
    if count and not is_final and tokens[count - 1] % 5 == 0:
        count -= 1
    return "".join(f"{token} " for token in tokens[:count])
