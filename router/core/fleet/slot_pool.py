"""Small integers that name sequences on a stream."""

from __future__ import annotations

from collections import deque
from typing import Final

MIN_RESTING_SLOTS: Final = 64


class SlotPool:
    """Allocates slots; the slot that was freed longest ago is reused first.

    A slot rests before it is reused (while fewer than MIN_RESTING_SLOTS rest, new slots are made): a cancel that
    crosses its sequence's end on the wire then finds an unused slot, and not the next sequence.
    """

    def __init__(self) -> None:
        self._resting: deque[int] = deque()
        self._next = 0

    def allocate(self) -> int:
        if len(self._resting) >= MIN_RESTING_SLOTS:
            return self._resting.popleft()
        self._next += 1
        return self._next

    def free(self, slot: int) -> None:
        self._resting.append(slot)

    @property
    def num_allocated(self) -> int:
        return self._next - len(self._resting)
