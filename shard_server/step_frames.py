"""How a StepFrame is filled, and how frames that wait to be written are merged into one.

Merging helps when a router is busy or when the engine's steps are shorter than a write: every process downstream then
has fewer wake-ups and fewer messages to handle.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from kvloom.v1.generation_pb2 import SequenceFinish, SequenceStart, StepFrame, TokenLogprobs
from kvloom.v1.shard_service_pb2 import ShardServiceConnectResponse

MAX_MERGED_TOKENS: Final = 4096
"""A frame that holds this many tokens is not merged with later frames."""


class StepParts:
    """The fields of a StepFrame that is being filled; the proto file describes them."""

    __slots__ = ("deltas", "finishes", "logprobs", "num_tokens", "slots", "starts", "token_ids", "uneven")

    def __init__(self) -> None:
        self.slots: list[int] = []
        self.num_tokens: list[int] = []
        self.uneven = False
        """True when an entry has no token or several tokens."""
        self.token_ids: list[int] = []
        self.deltas: list[str] = []
        self.logprobs: list[TokenLogprobs] = []
        self.starts: list[SequenceStart] = []
        self.finishes: list[SequenceFinish] = []

    def __bool__(self) -> bool:
        return bool(self.slots or self.finishes or self.starts)

    def to_proto(self) -> StepFrame:
        return StepFrame(
            slots=self.slots,
            num_tokens=self.num_tokens if self.uneven else (),
            token_ids=self.token_ids,
            deltas=self.deltas,
            logprobs=self.logprobs,
            starts=self.starts,
            finishes=self.finishes,
        )


def take_merged(pending: deque[ShardServiceConnectResponse]) -> ShardServiceConnectResponse:
    """Removes and returns the first frame, merged with the frames behind it up to one that carries a snapshot
    or a list of adapters."""
    frame = pending.popleft()
    if not pending:
        return frame
    has_merged = False
    while pending and len(frame.step.token_ids) < MAX_MERGED_TOKENS:
        later = pending[0]
        if later.HasField("kv_snapshot") or later.HasField("adapters"):
            break
        pending.popleft()
        has_merged = True
        if later.HasField("kv_events"):
            frame.more_kv_events.append(later.kv_events)
        if later.HasField("load"):
            frame.load.CopyFrom(later.load)
        if later.HasField("step"):
            if later.step.num_tokens or frame.step.num_tokens:
                _fill_num_tokens(frame.step)
                _fill_num_tokens(later.step)
            frame.step.MergeFrom(later.step)
    if has_merged and len(set(frame.step.slots)) < len(frame.step.slots):
        frame.step.CopyFrom(_one_entry_per_slot(frame.step))
    return frame


def _fill_num_tokens(step: StepFrame) -> None:
    """`num_tokens` is left empty where every entry has exactly one token."""
    if not step.num_tokens:
        step.num_tokens.extend([1] * len(step.slots))


def _one_entry_per_slot(step: StepFrame) -> StepFrame:
    """The same step with one entry for each slot, in the order of the slots' first entries."""
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
