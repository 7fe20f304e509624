"""Steps that wait for a slow client: all that wait are sent as one step, and their number is bounded."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Final, TypeVar

from router.core.frames import Step

T = TypeVar("T")

MAX_WAITING_ENTRIES: Final = 65_536
"""Tokens, starts and finishes that may wait for one client: about 20 seconds of 64 fast sequences."""
WAITING_ENTRIES_PER_ANSWER: Final = 256
"""So many more may wait for each of its answers: all that a safety service was waited for becomes clear at once."""


class StepOutbox:
    """The steps that one client has not taken yet."""

    def __init__(self, max_entries: int = MAX_WAITING_ENTRIES) -> None:
        self._max_entries = max_entries
        self._steps: list[Step] = []
        self._num_entries = 0

    def __bool__(self) -> bool:
        return bool(self._steps)

    def add(self, step: Step) -> bool:
        """Adds a step, which the caller must not modify afterwards. Returns False when so many entries wait that the
        client is too slow, unless it has many answers (`is_behind`)."""
        self._num_entries += len(step.token_ids) + len(step.starts) + len(step.finishes) + 1
        self._steps.append(step)
        return self._num_entries <= self._max_entries

    def is_behind(self, num_answers: int) -> bool:
        """Returns True when more entries wait than a client with so many answers may have."""
        return self._num_entries > self._max_entries + WAITING_ENTRIES_PER_ANSWER * num_answers

    def take(self) -> Step | None:
        """Returns everything that waits as one step, or None when nothing does."""
        if not self._steps:
            return None
        steps, self._steps = self._steps, []
        self._num_entries = 0
        return steps[0] if len(steps) == 1 else merge_steps(steps)


def merge_steps(steps: Sequence[Step]) -> Step:
    """Returns one step with the content of several, in order; each slot has at most one entry, unless there are answers
    from the result cache."""
    merged = Step(
        slots=_concatenated([step.slots for step in steps]),
        token_ids=_concatenated([step.token_ids for step in steps]),
        deltas=_concatenated([step.deltas for step in steps]),
        logprobs=_concatenated([step.logprobs for step in steps]),
        starts=_concatenated([step.starts for step in steps]),
        finishes=_concatenated([step.finishes for step in steps]),
    )
    if any(step.num_tokens for step in steps):
        merged.num_tokens = _concatenated([step.num_tokens or [1] * len(step.slots) for step in steps])
        merged.has_replay = any(step.has_replay for step in steps)
    # Steps of different shards have no slots in common; those of one shard nearly always have.
    if len(set(merged.slots)) < len(merged.slots) and not merged.has_replay:
        _gather_by_slot(merged)
    return merged


def _gather_by_slot(step: Step) -> None:
    """Joins the entries of each slot; slots keep the order of their first entries."""
    ids: dict[int, list[int]] = {}
    texts: dict[int, list[str]] = {}
    position = 0
    for i, (slot, delta) in enumerate(zip(step.slots, step.deltas, strict=True)):
        count = step.num_tokens[i] if step.num_tokens else 1
        ids.setdefault(slot, []).extend(step.token_ids[position : position + count])
        texts.setdefault(slot, []).append(delta)
        position += count
    step.slots = list(ids)
    step.num_tokens = [len(own) for own in ids.values()]
    step.token_ids = _concatenated(list(ids.values()))
    step.deltas = ["".join(own) for own in texts.values()]
    if step.logprobs:
        rank = {slot: i for i, slot in enumerate(step.slots)}
        step.logprobs.sort(key=lambda entry: rank.get(entry[0], len(rank)))


def _concatenated(lists: Sequence[list[T]]) -> list[T]:
    return list(chain.from_iterable(lists))
