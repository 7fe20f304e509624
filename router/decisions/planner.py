"""`RouterService.Plan`: the core's explanation of a placement as the message that people and tools read."""

from __future__ import annotations

from typing import Protocol

from kvloom.v1.router_service_pb2 import PlacementRegret, PlanResponse, ShardScore
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
        regret=_regret(plan),
    )


def _regret(plan: Plan) -> PlacementRegret | None:
    """See PlacementRegret in router_service.proto; None when nothing was picked."""
    possible = [shard for shard in plan.shards if not shard.filtered_reason]
    picked = next((shard for shard in possible if shard.shard_id == plan.picked_shard_id), None)
    if picked is None:
        return None
    return PlacementRegret(
        cost_seconds=_above(picked.cost_seconds, min(shard.cost_seconds for shard in possible)),
        ttft_seconds=_above(picked.predicted_ttft_seconds, min(shard.predicted_ttft_seconds for shard in possible)),
    )


def _above(value: float, lowest: float) -> float:
    """Where all are infinite none is above another."""
    return 0.0 if value == lowest else value - lowest


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
