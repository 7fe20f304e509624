"""Frames that wait to be written become one: a router that is busy, or an engine whose steps are shorter than a write,
then costs everyone behind fewer wake-ups and fewer messages."""

from __future__ import annotations

from collections import deque
from typing import Final

from kvloom.v1.generation_pb2 import StepFrame, TokenLogprobs
from kvloom.v1.shard_service_pb2 import ShardServiceConnectResponse

MAX_MERGED_TOKENS: Final = 4096
"""A frame that has so many takes up no more."""


def take_merged(pending: deque[ShardServiceConnectResponse]) -> ShardServiceConnectResponse:
    """The first frame, and with it the news of those behind it up to one that carries a snapshot."""
    frame = pending.popleft()
    if not pending:
        return frame
    has_merged = False
    while pending and len(frame.step.token_ids) < MAX_MERGED_TOKENS:
        later = pending[0]
        if later.HasField("kv_snapshot"):
            break
        pending.popleft()
        has_merged = True
        if later.HasField("kv_events"):
            frame.more_kv_events.append(later.kv_events)
        if later.HasField("load"):
            frame.load.CopyFrom(later.load)
        if later.HasField("step"):
            if later.step.num_tokens or frame.step.num_tokens:
                _spell_out(frame.step)
                _spell_out(later.step)
            frame.step.MergeFrom(later.step)
    if has_merged and len(set(frame.step.slots)) < len(frame.step.slots):
        frame.step.CopyFrom(_gathered(frame.step))
    return frame


def _spell_out(step: StepFrame) -> None:
    """`num_tokens` may be left out where each entry has one."""
    if not step.num_tokens:
        step.num_tokens.extend([1] * len(step.slots))


def _gathered(step: StepFrame) -> StepFrame:
    """One entry for each slot, in the order of their first ones."""
    token_ids: dict[int, list[int]] = {}
    deltas: dict[int, list[str]] = {}
    position = 0
    ids = step.token_ids[:]
    counts = step.num_tokens[:] or [1] * len(step.slots)
    for slot, count, delta in zip(step.slots, counts, step.deltas, strict=True):
        token_ids.setdefault(slot, []).extend(ids[position : position + count])
        deltas.setdefault(slot, []).append(delta)
        position += count
    logprobs: dict[int, list[TokenLogprobs]] = {slot: [] for slot in token_ids}
    for entry in step.logprobs:
        logprobs[entry.slot].append(entry)
    return StepFrame(
        slots=list(token_ids),
        num_tokens=[len(own) for own in token_ids.values()],
        token_ids=[token_id for own in token_ids.values() for token_id in own],
        deltas=["".join(own) for own in deltas.values()],
        logprobs=[entry for own in logprobs.values() for entry in own],
        starts=step.starts,
        finishes=step.finishes,
    )
