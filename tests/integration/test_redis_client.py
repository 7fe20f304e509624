"""Commands to Redis can be cancelled at any time, and what is cancelled leaves nothing behind for the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import redis.asyncio.retry
import redis.backoff
import uvloop

from kvloom_common.discovery.redis_client import redis_client

MAX_STEPS = 60
"""Iterations of the event loop, more than a command takes."""


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("connected", [False, True])
def test_a_command_that_is_cancelled_at_any_moment_does_not_go_on(
    redis_url: str, new_loop: Callable[[], Any], connected: bool
) -> None:
    """Otherwise the request of a client that has left continues, and takes a stream from the connection with which the
    client has returned (found by `kvloom-lab chaos`)."""
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(_cancel_at_any_moment(redis_url, connected))


async def _cancel_at_any_moment(url: str, connected: bool) -> None:
    retry = redis.asyncio.retry.Retry(redis.backoff.NoBackoff(), 0)
    num_cancelled = 0
    for num_steps in range(MAX_STEPS):
        client = redis_client(url, timeout_seconds=5.0, retry=retry)
        if connected:
            await client.set("cancelled", "old")
        task = asyncio.create_task(_set(client))
        for _ in range(num_steps):
            await asyncio.sleep(0)
        num_cancelled += task.cancel()
        was_done = task.done()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(outcome, asyncio.CancelledError) != was_done, f"after {num_steps} steps"
        assert await client.echo("hello") == b"hello"
        await client.aclose()
    # The cancellation comes before the command, while it is sent, and just as it has been sent. How many more
    # steps the reply takes depends on Redis.
    assert num_cancelled >= 3


async def _set(client: Any) -> None:
    await client.set("cancelled", "new")
