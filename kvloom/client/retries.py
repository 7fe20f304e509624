"""Decides which failed requests the SDK repeats by itself, and when."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from kvloom.enums import ErrorReason
from kvloom.errors import KvloomError

MAX_RETRIES: Final = 2
"""The default, which is that of OpenAI's clients."""
FIRST_PAUSE_SECONDS: Final = 0.5
LONGEST_PAUSE_SECONDS: Final = 8.0
LONGEST_ADVISED_SECONDS: Final = 60.0
"""If the fabric advises a longer pause, the error is the caller's to deal with."""

RETRIED: Final = frozenset(
    {
        ErrorReason.RATE_LIMITED,
        ErrorReason.QUEUE_FULL,
        ErrorReason.NO_SHARD_READY,
        ErrorReason.QUEUE_TIMEOUT,
        ErrorReason.DRAINING,
        ErrorReason.OVERLOADED,
        ErrorReason.BROWNOUT,
        ErrorReason.SHARD_LOST,
        ErrorReason.ROUTER_LOST,
        ErrorReason.SAFETY_UNAVAILABLE,
        ErrorReason.AUTH_UNAVAILABLE,
        ErrorReason.CELL_UNAVAILABLE,
    }
)
"""The fleet could not serve the request, and may be able to soon."""


def retry_pause_seconds(
    error: KvloomError, num_retries: int, jitter: Callable[[], float] = lambda: random.uniform(0.75, 1.0)
) -> float | None:
    """How long to wait before the next attempt at a request that failed before any output, after `num_retries` of them.
    None: another attempt makes no sense."""
    if error.reason not in RETRIED:
        return None
    if error.retry_after_seconds > 0:
        return error.retry_after_seconds if error.retry_after_seconds <= LONGEST_ADVISED_SECONDS else None
    return min(FIRST_PAUSE_SECONDS * 2.0**num_retries, LONGEST_PAUSE_SECONDS) * jitter()
