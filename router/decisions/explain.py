"""`RouterService.Explain`: a remembered request as the message that people and tools read."""

from __future__ import annotations

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.router_service_pb2 import ExplainResponse, PlacementDecision, RequestOutcome
from router.core.actions import RequestEnded
from router.core.placement.plan import Plan
from router.decisions.log import Remembered
from router.decisions.planner import plan_to_proto
from router.decisions.records import AttemptRecord


def explanation_to_proto(remembered: Remembered) -> ExplainResponse:
    attempts = remembered.attempts
    response = ExplainResponse(request_id=remembered.request_id)
    response.decisions.extend(_decision_to_proto(attempt, remembered.num_prompt_tokens) for attempt in attempts)
    if remembered.ended is not None:
        response.outcome.CopyFrom(_outcome_to_proto(remembered.ended, attempts))
    return response


def not_remembered(request_id: str) -> KvloomError:
    return KvloomError(
        ErrorReason.ERROR_REASON_NOT_FOUND,
        f"No placement of a request {request_id!r} is remembered here: it was never placed, or not by this router, or "
        "too long ago, or it was not among those that are (router.decision_log).",
        field="request_id",
    )


def _decision_to_proto(attempt: AttemptRecord, num_prompt_tokens: int) -> PlacementDecision:
    plan = Plan(num_prompt_tokens, [score.to_plan() for score in attempt.shards], attempt.picked_shard_id)
    return PlacementDecision(
        attempt_id=attempt.attempt_id, decided_at_seconds=attempt.decided_at, plan=plan_to_proto(plan)
    )


def _outcome_to_proto(ended: RequestEnded, attempts: list[AttemptRecord]) -> RequestOutcome:
    outcome = RequestOutcome(
        # The stubs take the enums' types, ints are fine.
        reason=ended.reason,  # pyright: ignore[reportArgumentType]
        error_reason=ended.error_reason,  # pyright: ignore[reportArgumentType]
        shard_id=ended.shard_id,
        num_attempts=ended.num_attempts,
        num_prompt_tokens=ended.num_prompt_tokens,
        num_cached_tokens=ended.num_cached_tokens,
        num_output_tokens=ended.num_output_tokens,
        queue_time_seconds=ended.queue_time_seconds,
        ttft_seconds=ended.ttft_seconds,
        e2e_latency_seconds=ended.e2e_latency_seconds,
    )
    first = attempts[0]
    if first.attempt_id == 1:
        picked = next(score.to_plan() for score in first.shards if score.shard_id == first.picked_shard_id)
        outcome.predicted_ttft_seconds = ended.queue_time_seconds + picked.predicted_ttft_seconds
        if ended.ttft_seconds is not None:
            outcome.ttft_error_seconds = ended.ttft_seconds - outcome.predicted_ttft_seconds
    return outcome
