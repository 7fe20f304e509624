"""The prediction that a placement makes for its request."""

from __future__ import annotations

from router.core.load.load_view import LoadView
from router.core.load.prediction import PlacementPrediction
from router.core.placement.policy import Candidate


def predict(view: LoadView, candidate: Candidate, placed_after_seconds: float) -> PlacementPrediction:
    """Returns the prediction for a request that is placed on the shard of that view, which it sees as `candidate`."""
    # The terms of `candidate.predicted_ttft_seconds` beside its own prefill, with the wait for KV memory.
    waiting_seconds = candidate.queue_seconds + candidate.memory_wait_seconds + candidate.adapter_wait_seconds
    if view.held or candidate.yielding_seconds:
        waiting_seconds += candidate.held_ahead_seconds - candidate.yielding_seconds
    step_seconds = view.report.decode_step_seconds
    if step_seconds:
        num_tokens = candidate.num_prefill_tokens + candidate.num_overlap_tokens
        step_seconds += view.decode_speed.seconds_per_token * view.decode_factor * num_tokens
    return PlacementPrediction(
        placed_after_seconds,
        waiting_seconds,
        candidate.own_seconds,
        candidate.num_expected_tokens,
        step_seconds,
        candidate.utilisation,
    )
