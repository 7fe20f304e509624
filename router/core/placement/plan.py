"""The explanation of one placement."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from kvloom.errors import KvloomError


@dataclasses.dataclass(frozen=True, slots=True)
class ShardPlan:
    """How one shard compares for one request; the fields of ShardScore in router_service.proto."""

    shard_id: str
    num_overlap_tokens: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_queued_prefill_tokens: int = 0
    predicted_ttft_seconds: float = 0.0
    cost_seconds: float = 0.0
    """The sum of the terms; lower is better. It is in the policy's own unit where that is not time."""
    cost_terms: Mapping[str, float] = dataclasses.field(default_factory=dict)
    filtered_reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class PlacementPlan:
    """The best shard first, filtered ones last."""

    num_prompt_tokens: int
    shards: Sequence[ShardPlan]
    picked_shard_id: str = ""
    error: KvloomError | None = None
    """Set when no shard was picked."""
