"""What a modelled shard sends to a router, in the router core's terms."""

from __future__ import annotations

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import FinishReason
from router.core import events as ev
from router.core.frames import Finish, Start, Step
from tools.simulate.fleet.shard import ShardOutput


def step_of(news: ShardOutput, router_index: int) -> Step:
    """What one router gets of a shard's news. A sequence's first token comes by itself; all the others come at once,
    with its end, so that virtual time costs no more where answers are long."""
    step = Step()
    for sequence in news.starts:
        if sequence.router_index == router_index:
            queue_seconds = sequence.admitted_at - sequence.submitted_at
            step.starts.append(Start(sequence.slot, sequence.num_cached_tokens, queue_seconds))
            step.slots.append(sequence.slot)
            step.num_tokens.append(1)
    for sequence in news.ends:
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
    """The answer to a sequence that the shard's whole cache could not hold."""
    error = KvloomError(
        ErrorReason.ERROR_REASON_CONTEXT_LENGTH_EXCEEDED, "The shard's KV cache is too small for this request."
    )
    return ev.StepArrived(shard_id, Step(finishes=[Finish(slot, FinishReason.FINISH_REASON_ERROR, error=error)]))
