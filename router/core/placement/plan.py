"""The explanation of one placement: how every shard compared for the request, and which one was picked."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from kvloom.errors import KvloomError
from router.core.placement.policy import Candidate


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
    prefill_deviation_seconds: float | None = None
    """Standard deviation of the request's predicted prefill time on the picked shard. None: it was not asked for."""


class Pick(msgspec.Struct):
    """A placement as it was made, from which its explanation is computed on demand. It refers to the inputs
    of the placement, none of which changes later."""

    num_prompt_tokens: int
    picked_shard_id: str
    best_shard_id: str
    """The cheapest shard: nearly always the picked one."""
    term_names: Sequence[str]
    candidates: Sequence[Candidate]
    terms: Sequence[tuple[float, ...]]
    """The cost terms of each candidate."""
    filtered: Sequence[ShardPlan] = ()
    """The shards that could not take the request."""

    @property
    def plan(self) -> PlacementPlan:
        plans = [
            ShardPlan(
                shard_id=candidate.shard_id,
                num_overlap_tokens=candidate.num_overlap_tokens,
                num_running=candidate.num_running,
                num_waiting=candidate.num_waiting,
                num_queued_prefill_tokens=candidate.num_queued_prefill_tokens,
                predicted_ttft_seconds=candidate.predicted_ttft_seconds,
                cost_seconds=sum(values),
                cost_terms=dict(zip(self.term_names, values, strict=True)),
            )
            for candidate, values in zip(self.candidates, self.terms, strict=True)
        ]
        shards = in_order([*plans, *self.filtered], self.picked_shard_id, self.best_shard_id)
        return PlacementPlan(self.num_prompt_tokens, shards, picked_shard_id=self.picked_shard_id)


def in_order(shards: Iterable[ShardPlan], picked_shard_id: str, best_shard_id: str) -> list[ShardPlan]:
    """The picked shard first, then the best, then by cost; filtered ones last, in their own order."""

    def rank(shard: ShardPlan) -> tuple[bool, bool, bool, float, str]:
        is_filtered = bool(shard.filtered_reason)
        tie_break = "" if is_filtered else shard.shard_id
        is_other = shard.shard_id != picked_shard_id
        return is_other, is_filtered, shard.shard_id != best_shard_id, shard.cost_seconds, tie_break

    return sorted(shards, key=rank)
