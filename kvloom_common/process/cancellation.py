"""Restores task cancellations that a library has swallowed."""

from __future__ import annotations

import asyncio


def raise_if_cancelled() -> None:
    """Raise CancelledError if this task is being cancelled. Call it after catching an exception, or after awaiting a
    call that may swallow a cancellation. When closing something fails (e.g. a Redis connection whose server has just
    gone), that error replaces the cancellation that closed it, and gRPC may lose a cancellation that coincides with a
    message. The task would then run on."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
