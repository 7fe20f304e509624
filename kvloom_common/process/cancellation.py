"""Restores task cancellations that a library has swallowed."""

from __future__ import annotations

import asyncio


def raise_if_cancelled() -> None:
    """Raise CancelledError if this task is being cancelled. Call it after catching an exception, or after awaiting a
    call that may swallow a cancellation. When closing something fails (e.g. a Redis connection whose server has just
    gone), that error replaces the cancellation that closed it, and gRPC may lose a cancellation that coincides with a
    message. The task would then run on."""
    if num_cancellations():
        raise asyncio.CancelledError


def num_cancellations() -> int:
    """How often this task has been cancelled. Compare it with an earlier number where the task may have caught a
    cancellation on purpose, to clean up."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()
