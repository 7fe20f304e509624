"""Converts the results of a modelled shard to frames for the router core."""

from __future__ import annotations

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import FinishReason
from router.core import events as ev
from router.core.frames import Finish, Start, Step
from tools.simulate.fleet.shard import StepResult


def step_of(result: StepResult, router_index: int) -> Step:
    """The frame for one router. The first token of a sequence is sent by itself. All others are sent at once with its
    finish, so that long answers cost no more to simulate than short ones."""
    step = Step()
    for sequence in result.starts:
        if sequence.router_index == router_index:
            queue_seconds = sequence.admitted_at - sequence.submit_time
            step.starts.append(Start(sequence.slot, sequence.num_cached_tokens, queue_seconds))
            step.slots.append(sequence.slot)
            step.num_tokens.append(1)
    for sequence in result.ends:
        if sequence.router_index != router_index:
            continue
        if sequence.is_cancelled:
            step.finishes.append(Finish(sequence.slot, FinishReason.FINISH_REASON_CANCELLED))
            continue
        num_tokens = sequence.num_output_tokens
        if num_tokens > 1:
            step.slots.append(sequence.slot)
            step.num_tokens.append(num_tokens - 1)
        step.finishes.append(
            Finish(
                sequence.slot,
                FinishReason.FINISH_REASON_LENGTH,
                sequence.num_prompt_tokens,
                sequence.num_cached_tokens,
                num_tokens,
            )
        )
    step.token_ids = [0] * sum(step.num_tokens)
    step.deltas = [""] * len(step.slots)
    return step


def too_long(shard_id: str, slot: int) -> ev.StepArrived:
    """The rejection of a sequence that is larger than the whole cache of the shard."""
    error = KvloomError(
        ErrorReason.ERROR_REASON_CONTEXT_LENGTH_EXCEEDED, "The shard's KV cache is too small for this request."
    )
    return ev.StepArrived(shard_id, Step(finishes=[Finish(slot, FinishReason.FINISH_REASON_ERROR, error=error)]))
