"""The responses of `RouterService.Plan` and `Explain`: placements as messages for people and tools."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.router_service_pb2 import (
    ExplainResponse,
    JudgedTerm,
    PlacementDecision,
    PlacementRegret,
    PlanResponse,
    RequestOutcome,
    ShardScore,
)
from kvloom_common.models.model_routes import Cascade, ChosenRoute
from router.convert import objectives_outcome_to_proto
from router.core.actions import RequestEnded
from router.core.placement.plan import PlacementPlan, ShardPlan
from router.decisions.log import RememberedRequest
from router.decisions.records import AttemptRecord


def plan_to_proto(
    plan: PlacementPlan, model: str = "", chosen: ChosenRoute | None = None, brownout: str = ""
) -> PlanResponse:
    """`chosen`: how the model was chosen, if it was not named. `brownout`: how the answer would be degraded."""
    return PlanResponse(
        model=model,
        route="" if chosen is None else chosen.how,
        conditions="" if chosen is None else chosen.conditions,
        candidates=() if chosen is None else list(chosen.cascades),
        tests=() if chosen is None else list(dict.fromkeys(itertools.chain(*map(_tests, chosen.cascades.values())))),
        num_prompt_tokens=plan.num_prompt_tokens,
        shards=[_shard_to_proto(shard) for shard in plan.shards],
        picked_shard_id=plan.picked_shard_id,
        error=None if plan.error is None else plan.error.to_proto(),
        regret=regret_of(plan),
        brownout=brownout,
        prefill_deviation_seconds=plan.prefill_deviation_seconds,
    )


def without_load(plan: PlanResponse) -> PlanResponse:
    """The same message, with what a tenant may see: where its request goes and what is cached of its own, but not how
    much other tenants do. It could measure the time to its first token itself."""
    picked = [shard for shard in plan.shards if shard.shard_id == plan.picked_shard_id]
    shown = [
        ShardScore(
            shard_id=shard.shard_id,
            num_overlap_tokens=shard.num_overlap_tokens,
            predicted_ttft_seconds=shard.predicted_ttft_seconds,
        )
        for shard in picked
    ]
    del plan.shards[:]
    plan.shards.extend(shown)
    plan.ClearField("regret")
    return plan


def _tests(cascade: Cascade) -> Sequence[str]:
    least = f" >= {cascade.tests.min_mean_logprob:g}"
    return [f"{test}{least if test == 'logprob' else ''}" for test in cascade.tests.escalate_on]


def regret_of(plan: PlacementPlan) -> PlacementRegret | None:
    """Returns the regret as PlacementRegret in router_service.proto defines it, or None when no shard was picked."""
    possible = [shard for shard in plan.shards if not shard.filtered_reason]
    picked = next((shard for shard in possible if shard.shard_id == plan.picked_shard_id), None)
    if picked is None:
        return None
    return PlacementRegret(
        cost_seconds=_above(picked.cost_seconds, min(shard.cost_seconds for shard in possible)),
        ttft_seconds=_above(picked.predicted_ttft_seconds, min(shard.predicted_ttft_seconds for shard in possible)),
    )


def _above(value: float, lowest: float) -> float:
    """Returns the difference, which is 0 if both are infinite."""
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


def explanation_to_proto(remembered: RememberedRequest, other_request_ids: Sequence[str] = ()) -> ExplainResponse:
    response = ExplainResponse(
        request_id=remembered.request_id,
        client_request_id=remembered.client_request_id,
        other_request_ids=other_request_ids,
        brownout=remembered.brownout,
        priority_class=remembered.priority_class.name,
        rank=remembered.priority_class.rank,
        tenant=remembered.tenant,
        fairness_id=remembered.fairness_id,
    )
    response.decisions.extend(
        _decision_to_proto(attempt, remembered.num_prompt_tokens) for attempt in remembered.attempts
    )
    if remembered.ended is not None:
        response.outcome.CopyFrom(outcome_to_proto(remembered.ended))
    return response


def not_remembered(request_id: str, field: str = "request_id") -> KvloomError:
    return KvloomError(
        ErrorReason.ERROR_REASON_NOT_FOUND,
        f"This router remembers no placement of a request {request_id!r}. The request never arrived, another router "
        "had it, it was too long ago, or it was not sampled (router.decision_log).",
        field=field,
    )


def _decision_to_proto(attempt: AttemptRecord, num_prompt_tokens: int) -> PlacementDecision:
    plan = PlacementPlan(num_prompt_tokens, [score.to_plan() for score in attempt.shards], attempt.picked_shard_id)
    return PlacementDecision(
        attempt_id=attempt.attempt_id, decided_at_seconds=attempt.decided_at, plan=plan_to_proto(plan)
    )


def outcome_to_proto(ended: RequestEnded) -> RequestOutcome:
    outcome = RequestOutcome(
        # The stubs want the enums' types, but ints are fine.
        reason=ended.reason,  # pyrefly: ignore[bad-argument-type]
        error_reason=ended.error_reason,  # pyrefly: ignore[bad-argument-type]
        shard_id=ended.shard_id,
        num_attempts=ended.num_attempts,
        num_prompt_tokens=ended.num_prompt_tokens,
        num_cached_tokens=ended.num_cached_tokens,
        num_output_tokens=ended.num_output_tokens,
        queue_time_seconds=ended.queue_time_seconds,
        ttft_seconds=ended.ttft_seconds,
        e2e_latency_seconds=ended.e2e_latency_seconds,
        limits="" if ended.usage is None else ended.usage.limits,
        num_reasoning_tokens=0 if ended.usage is None else ended.usage.num_reasoning_tokens,
        num_preemptions=ended.moves.num_preemptions,
        num_migrations=ended.moves.num_migrations,
        num_failovers=ended.moves.num_failovers,
        num_notice_migrations=ended.moves.num_notice_migrations,
        end=ended.end.value,
        rank=ended.priority_class.rank_after(ended.queue_time_seconds),
        moved_seconds=ended.moves.moved_seconds,
    )
    if ended.objectives is not None:
        outcome.objectives.CopyFrom(objectives_outcome_to_proto(ended.objectives))
    if ended.prediction is not None:
        started = ended.prediction.started_after_seconds
        if started is not None and ended.ttft_seconds is not None:
            outcome.withheld_seconds = max(0.0, ended.ttft_seconds - started)
        outcome.predicted_ttft_seconds = ended.prediction.ttft_seconds
        if ended.ttft_seconds is not None:
            outcome.ttft_error_seconds = ended.ttft_seconds - outcome.predicted_ttft_seconds
    outcome.predictions.extend(
        JudgedTerm(term=judged.term, predicted_seconds=judged.predicted_seconds, actual_seconds=judged.actual_seconds)
        for judged in ended.judged_prediction
    )
    return outcome
