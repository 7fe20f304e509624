"""`RouterService.Plan`: the core's explanation of a placement as the message that people and tools read."""

from __future__ import annotations

from typing import Protocol

from kvloom.v1.router_service_pb2 import PlanResponse, ShardScore
from router.core.events import Request
from router.core.placement.plan import Plan, ShardPlan


class Planner(Protocol):
    """What `Plan` needs of the core."""

    def plan(self, request: Request, now: float) -> Plan: ...


def plan_to_proto(plan: Plan) -> PlanResponse:
    return PlanResponse(
        num_prompt_tokens=plan.num_prompt_tokens,
        shards=[_shard_to_proto(shard) for shard in plan.shards],
        picked_shard_id=plan.picked_shard_id,
        error=None if plan.error is None else plan.error.to_proto(),
    )


def _shard_to_proto(shard: ShardPlan) -> ShardScore:
    return ShardScore(
        shard_id=shard.shard_id,
        num_overlap_tokens=shard.num_overlap_tokens,
        num_running=shard.num_running,
        num_waiting=shard.num_waiting,
        num_queued_prefill_tokens=shard.num_queued_prefill_tokens,
        predicted_ttft_seconds=shard.predicted_ttft_seconds,
        cost_seconds=shard.cost_seconds,
        cost_terms=dict(shard.cost_terms),
        filtered_reason=shard.filtered_reason,
    )
