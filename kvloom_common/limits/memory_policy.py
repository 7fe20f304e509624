"""Decides when a process holds too much memory, and when it is worth returning freed memory to the system."""

from __future__ import annotations

import dataclasses
import enum
from typing import Final

HIGH_SHARE: Final = 0.85
"""The part of the limit at which the process begins to refuse large work."""
RECOVERED_SHARE: Final = 0.95
"""A level ends when the memory has fallen below this part of where the level begins, so that it does not flicker."""
LARGE_BYTES: Final = 64 * 2**10
"""Work that holds more than this is large."""
RETURN_BYTES: Final = 16 * 2**20
"""How much the memory must have grown since freed memory was last returned."""
STEADY_BYTES: Final = 4 * 2**20
"""Memory that changes by less than this between two samples is steady: no burst is under way."""
NUM_STEADY_SAMPLES: Final = 2
CHECK_SAMPLES: Final = 4
"""After so many samples it is tried once more, because the end of a burst may have freed memory since."""


class MemoryLevel(enum.IntEnum):
    """How close a process is to its limit."""

    NORMAL = 0
    HIGH = 1
    """Large work is refused, and caches are released."""
    FULL = 2
    """All new work is refused. Running answers continue."""


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryVerdict:
    """The consequences of a sample."""

    level: MemoryLevel
    returns_memory: bool
    """True when freed memory should be returned to the system now."""


class MemoryPolicy:
    """Sees the resident memory of one process, at regular intervals."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.level = MemoryLevel.NORMAL
        self._begins_at = {MemoryLevel.HIGH: round(max_bytes * HIGH_SHARE), MemoryLevel.FULL: max_bytes}
        self._settled_bytes: int | None = None
        """The memory after freed memory was last returned."""
        self._last_bytes = 0
        self._num_steady = 0
        self._num_until_check = 0
        """0: no check is due."""

    def observe(self, resident_bytes: int) -> MemoryVerdict:
        self.level = self._next_level(resident_bytes)
        return MemoryVerdict(self.level, self._is_time_to_return(resident_bytes))

    def returned(self, resident_bytes: int) -> None:
        """Freed memory has been returned; so much is left."""
        has_grown = self._settled_bytes is not None and self._last_bytes - self._settled_bytes >= RETURN_BYTES
        was_worth_it = self._last_bytes - resident_bytes >= STEADY_BYTES
        self._num_until_check = CHECK_SAMPLES if has_grown or was_worth_it else 0
        self._settled_bytes = self._last_bytes = resident_bytes

    def _next_level(self, resident_bytes: int) -> MemoryLevel:
        for level in (MemoryLevel.FULL, MemoryLevel.HIGH):
            share = RECOVERED_SHARE if self.level >= level else 1.0
            if resident_bytes >= self._begins_at[level] * share:
                return level
        return MemoryLevel.NORMAL

    def _is_time_to_return(self, resident_bytes: int) -> bool:
        """In quiet times after growth. Above the normal level it does not wait for them: most of the memory may be
        free already, and the process refuses work because of it."""
        is_steady = abs(resident_bytes - self._last_bytes) < STEADY_BYTES
        self._num_steady = self._num_steady + 1 if is_steady else 0
        self._last_bytes = resident_bytes
        if self._settled_bytes is None or resident_bytes < self._settled_bytes:
            self._settled_bytes = resident_bytes
        if self.level > MemoryLevel.NORMAL:
            return True
        if self._num_until_check:
            self._num_until_check -= 1
            if not self._num_until_check:
                return True
        return self._num_steady >= NUM_STEADY_SAMPLES and resident_bytes - self._settled_bytes >= RETURN_BYTES
