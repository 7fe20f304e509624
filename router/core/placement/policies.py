"""Placement policies: pure functions from one candidate shard to the named terms of its cost.

`ect` is the estimated completion cost: how long the request would wait for its first token there, plus what it costs
everybody else. The others are yardsticks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Final

DEFAULT_PREFILL_TOKENS_PER_SECOND: Final = 10_000.0
DEFAULT_DECODE_STEP_SECONDS: Final = 0.02
PREFILL_CHUNK_TOKENS: Final = 2048
"""Prefill comes in chunks of about this size, and each shares its step with the running sequences' decode."""
OWN_PREFILL_WEIGHT: Final = 1.0
"""Prefill that a cache hit elsewhere would have saved is capacity lost to the fleet, beyond the time it takes."""
EVICTION_WEIGHT: Final = 0.5
"""Share of evicted blocks that somebody would have used again, were the cache's tail brand-new."""
EVICTION_AGE_SECONDS: Final = 120.0
"""Blocks that nobody has touched for so long are e times less likely to be used again."""


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """One shard, as one request sees it."""

    num_prefill_tokens: int
    """Tokens of the request that the shard would have to compute: those that do not lie in its cache."""
    num_queued_prefill_tokens: int
    num_running: int
    num_waiting: int
    prefill_tokens_per_second: float
    """0: not measured yet."""
    decode_step_seconds: float
    """0: not measured yet."""
    block_size: int
    num_evicted_blocks: int
    tail_age_seconds: float
    turn: int
    """When the shard was last picked, as a count of picks; 0: never."""

    @property
    def seconds_per_token(self) -> float:
        return 1.0 / (self.prefill_tokens_per_second or DEFAULT_PREFILL_TOKENS_PER_SECOND)

    @property
    def own_seconds(self) -> float:
        """Prefill of the request itself, on an otherwise idle shard."""
        return self.num_prefill_tokens * self.seconds_per_token

    @property
    def decode_interference(self) -> float:
        """How many times longer prefill takes because running sequences decode in the same steps."""
        if not self.num_running:
            return 1.0
        step_seconds = self.decode_step_seconds or DEFAULT_DECODE_STEP_SECONDS
        return 1.0 + step_seconds / (PREFILL_CHUNK_TOKENS * self.seconds_per_token)

    @property
    def predicted_ttft_seconds(self) -> float:
        queued_seconds = self.num_queued_prefill_tokens * self.seconds_per_token
        return (queued_seconds + self.own_seconds) * self.decode_interference


Policy = Callable[[Candidate], dict[str, float]]


def estimated_completion_cost(candidate: Candidate) -> dict[str, float]:
    """Seconds: (queued + own prefill) x decode interference + own prefill as lost capacity + the delay for those that
    wait there + the price of the cached blocks it would push out."""
    interference = candidate.decode_interference
    own = candidate.own_seconds
    recompute_seconds = candidate.num_evicted_blocks * candidate.block_size * candidate.seconds_per_token
    return {
        "queued_prefill": candidate.num_queued_prefill_tokens * candidate.seconds_per_token * interference,
        "own_prefill": own * interference,
        "lost_capacity": OWN_PREFILL_WEIGHT * own,
        "delay_of_others": own * candidate.num_waiting,
        "eviction": EVICTION_WEIGHT * recompute_seconds * math.exp(-candidate.tail_age_seconds / EVICTION_AGE_SECONDS),
    }


def round_robin(candidate: Candidate) -> dict[str, float]:
    """The shard whose turn is longest ago."""
    return {"turn": float(candidate.turn)}


def least_requests(candidate: Candidate) -> dict[str, float]:
    """The shard with the fewest sequences."""
    return {"running": float(candidate.num_running), "waiting": float(candidate.num_waiting)}


def least_prefill(candidate: Candidate) -> dict[str, float]:
    """The shard that has the least prefill queued, wherever the prefix lies."""
    return {"queued_prefill": candidate.num_queued_prefill_tokens * candidate.seconds_per_token}


POLICIES: Final[dict[str, Policy]] = {
    "ect": estimated_completion_cost,
    "round_robin": round_robin,
    "least_requests": least_requests,
    "least_prefill": least_prefill,
}
