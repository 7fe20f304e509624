"""Computes how many prompt tokens a cache that never forgets, and that all shards share, would have had. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class CachedRequest:
    """Says what a request reads from the cache, and when its own blocks are there for others."""

    prompt_token_ids: Sequence[int]
    num_output_tokens: int
    sent_at: float
    prefilled_at: float
    """From this time on, the prompt's blocks are available to others."""
    ended_at: float
    """From this time on, the answer's blocks are available too."""


def infinite_cache_tokens(requests: Sequence[CachedRequest], block_size: int) -> list[int]:
    """Return, for each request, the length in tokens of the longest prefix of whole blocks that earlier requests had
    left when it was sent.

    Answers are only known as text. Where a prompt continues a whole earlier prompt, it is assumed to contain that
    request's answer except for the answer's last token, which is sampled but never computed. That is the most that any
    cache can have. The last token of a prompt is never reused, because its logits are needed.
    """
    found: list[int] = []
    for request in requests:
        most = 0
        for earlier in requests:
            if earlier is not request and earlier.prefilled_at <= request.sent_at:
                most = max(most, _num_shared(request, earlier))
        usable = min(most, len(request.prompt_token_ids) - 1)
        found.append(usable // block_size * block_size)
    return found


def _num_shared(request: CachedRequest, earlier: CachedRequest) -> int:
    mine, theirs = request.prompt_token_ids, earlier.prompt_token_ids
    num_common = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
    if num_common is not None:
        return num_common
    if len(mine) <= len(theirs) or earlier.ended_at > request.sent_at:
        return min(len(mine), len(theirs))
    return len(theirs) + max(0, earlier.num_output_tokens - 1)
