"""Long prompts are prefilled in chunks: the router asks a shard to compute the first part of a prompt, then the next,
and sends the request itself when little is left.

An engine computes what it was given to the end. A prompt of 100,000 tokens keeps a shard busy for seconds, in which all
requests whose KV lies there wait. Between two chunks shorter requests go first (shortest remaining prefill first, as
closely as a router can follow it without the engine's help). The blocks of a chunk stay in the shard's prefix cache,
where the next one finds them.

The length of a chunk: a prefill of length L in chunks of s keeps each of the rate x L requests that arrive meanwhile
waiting for s / 2 instead of L / 2, and costs L / s times the overhead of a chunk. The least of rate x L x s / 2 +
overhead x L / s is at s = sqrt(2 x overhead / rate): the economic order quantity (Harris, How Many Parts to Make at
Once, 1913).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Final

import msgspec

from router.core.events import SHADOW_TIER, Request
from router.core.live import LiveRequest
from router.core.load.load_view import LoadView
from router.core.load.speed_model import PrefillWork
from router.core.placement.policy import Candidate

PREFILL_CHUNK_CLIENT_ID: Final = "router-prefill-chunk"
"""The client name under which prefill chunks are sent. Never metered."""
MIN_ARRIVAL_RATE: Final = 0.02
"""The least rate, in requests per second, for which a prompt is split."""
MIN_PREFILL_CHUNKS: Final = 1.5
"""Shorter prompts, in chunks, are sent whole."""
MAX_PREFILL_CHUNKS: Final = 64
"""The most chunks of one request."""
MAX_MEMORY_SHARE: Final = 0.75
"""Prompts are split for shards with at most this share of their blocks in use: above it sequences wait for memory
rather than for one another's prefill, and what prefill chunks have computed is evicted before it is used."""


def preparing(request: Request, name: str, **changes: Any) -> Request:
    """A request for one token that no client gets, sent because of the KV of another one's prompt. It is called
    "REQUEST~NAME", and is like that one but for these changes."""
    return msgspec.structs.replace(
        request,
        request_id=f"{request.request_id}~{name}",
        client_id=PREFILL_CHUNK_CLIENT_ID,
        prompt_text="",
        choices=(),
        max_tokens=1,
        **changes,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillChunkSettings:
    """The cost of a chunk, and its lower bounds."""

    overhead_seconds: float = 0.02
    """The cost of one more chunk to a request: messages there and back, and steps that the shard spends on others or on
    a token that is not needed."""
    min_seconds: float = 0.2
    min_tokens: int = 512
    """Both limits are of one chunk."""

    def prefill_chunk_seconds(self, arrival_rate: float) -> float:
        """How long a chunk should take at this rate of requests that would wait for it."""
        best_seconds = math.sqrt(2 * self.overhead_seconds / max(arrival_rate, MIN_ARRIVAL_RATE))
        return max(best_seconds, self.min_seconds)


def next_prefill_chunk(
    settings: PrefillChunkSettings | None,
    live: LiveRequest,
    candidate: Candidate,
    view: LoadView,
    max_tokens: int | None = None,
) -> int | None:
    """The number of prompt tokens up to which the next chunk goes: whole blocks, and at most `max_tokens` tokens. None:
    the rest goes in one piece, because it is short or because the shard does not keep what was computed for it."""
    if settings is None or live.num_attempts or live.num_prefill_chunks >= MAX_PREFILL_CHUNKS:
        return None
    if max_tokens is None and candidate.own_seconds < MIN_PREFILL_CHUNKS * settings.min_seconds:
        return None  # like nearly all; no rate of arrivals makes a chunk shorter than that
    if candidate.num_overlap_tokens < live.num_ready_tokens:
        return None
    if candidate.num_used_blocks > MAX_MEMORY_SHARE * candidate.num_blocks:
        return None
    seconds = settings.prefill_chunk_seconds(candidate.bound_arrival_rate)
    if max_tokens is not None:
        if candidate.num_prefill_tokens < MIN_PREFILL_CHUNKS * max_tokens:
            return None
    elif candidate.own_seconds < MIN_PREFILL_CHUNKS * seconds:
        return None
    if live.num_context_tokens >= candidate.num_blocks * candidate.block_size:
        return None  # it will be refused there
    if live.request.pooling is not None or live.request.images or live.request.tier is SHADOW_TIER:
        # An embedding's tokens are computed again; an image is whole; a shadow gives way to all others anyway.
        return None
    num_cached = candidate.num_overlap_tokens
    num_tokens = max(settings.min_tokens, view.speed.num_tokens_within(seconds, num_cached, view.num_context_tokens))
    if max_tokens is not None:
        num_tokens = min(num_tokens, max_tokens)
    end = (num_cached + num_tokens) // candidate.block_size * candidate.block_size
    limit = live.max_cached_tokens
    if limit is not None:
        end = min(end, limit // candidate.block_size * candidate.block_size)
    return end if num_cached < end < len(live.request.prompt_token_ids) else None


def rest_seconds(live: LiveRequest, num_tokens: int, view: LoadView) -> float:
    """Prefill time of the prompt after its first `num_tokens` tokens."""
    work = PrefillWork.of(live.num_context_tokens - num_tokens, num_tokens)
    return view.speed.seconds(work, view.num_context_tokens)
