"""Cancellations that get lost on their way through libraries."""

from __future__ import annotations

import asyncio


def raise_if_cancelled() -> None:
    """To be called where an exception was caught, or something awaited that may swallow a cancellation: an error while
    something is being closed (a Redis connection whose server has just gone, say) takes the place of the cancellation
    that closed it, gRPC may lose one that comes as a message arrives, and the task would live on."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
