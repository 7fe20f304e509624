"""Orders one shard's numbered KV event batches, and detects when only a snapshot can help."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from router.core.events import KvChange

SNAPSHOT_RETRY_SECONDS: Final = 5.0
"""A snapshot that has not come by then is requested again: it, or the request, was lost."""
MAX_HELD_BATCHES: Final = 1024

Changes = Sequence[KvChange]


class EventOrder:
    """Batches that arrive before their turn are kept: the missing one may be late, and a snapshot covers everything up
    to its own number only. At most MAX_HELD_BATCHES batches with at most `max_held_blocks` blocks together are kept;
    beyond that the oldest are dropped, which a snapshot makes good."""

    __slots__ = ("_asked_at", "_held", "_highest_number", "_max_held_blocks", "_next_number", "_num_held_blocks")

    def __init__(self, max_held_blocks: int, now: float) -> None:
        """A first snapshot is on its way without being requested."""
        self._max_held_blocks = max_held_blocks
        self._next_number: int | None = None
        """None: before the first snapshot."""
        self._highest_number = 0
        """The highest number of any batch that arrived."""
        self._held: dict[int, Changes] = {}
        self._num_held_blocks = 0
        self._asked_at: float | None = now

    @property
    def is_current(self) -> bool:
        """True when every batch that arrived has been taken."""
        return self._next_number is not None and self._next_number > self._highest_number

    def push(self, number: int, changes: Changes) -> Sequence[Changes]:
        """A batch arrived. Returns the batches whose turn it is now; one whose turn is over is ignored."""
        if number > self._highest_number:
            self._highest_number = number
        if number == self._next_number and not self._held:
            self._next_number = number + 1
            return (changes,)
        if (self._next_number is None or number >= self._next_number) and number not in self._held:
            self._held[number] = changes
            self._num_held_blocks += _num_blocks(changes)
        return self.take()

    def skip_to(self, snapshot_number: int) -> bool:
        """A snapshot arrived that covers the batches up to its number. Returns False when more than that has been
        taken."""
        if self._next_number is not None and snapshot_number + 1 < self._next_number:
            return False
        self._next_number = snapshot_number + 1
        self._asked_at = None  # the requested snapshot is here, so a later gap is a new one
        for number in [number for number in self._held if number <= snapshot_number]:
            self._forget(number)
        return True

    def take(self) -> list[Changes]:
        """Kept batches whose turn it is."""
        taken: list[Changes] = []
        while self._next_number is not None and self._next_number in self._held:
            taken.append(self._held[self._next_number])
            self._forget(self._next_number)
            self._next_number += 1
        if self._held and not self._fits():
            for number in sorted(self._held):
                if self._fits():
                    break
                self._forget(number)
        return taken

    def wants_snapshot(self, now: float) -> bool:
        """Returns True when a batch is missing and no snapshot was requested lately. True counts as a request."""
        if self.is_current:
            self._asked_at = None
            return False
        if self._asked_at is not None and now - self._asked_at < SNAPSHOT_RETRY_SECONDS:
            return False
        self._asked_at = now
        return True

    def check_integrity(self) -> None:
        assert self._fits()
        assert self._num_held_blocks == sum(map(_num_blocks, self._held.values()))
        assert self._next_number is None or all(number > self._next_number for number in self._held)

    def _fits(self) -> bool:
        return len(self._held) <= MAX_HELD_BATCHES and self._num_held_blocks <= self._max_held_blocks

    def _forget(self, number: int) -> None:
        self._num_held_blocks -= _num_blocks(self._held.pop(number))


def _num_blocks(changes: Changes) -> int:
    return sum(len(change.stored) + len(change.removed) for change in changes)
