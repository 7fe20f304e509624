"""A placement as it was made, from which its explanation can be computed later."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from router.core.placement.plan import PlacementPlan, ShardPlan
from router.core.placement.policy import Candidate


class Pick(msgspec.Struct):
    """Refers to the inputs of the placement; none of them changes later."""

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
