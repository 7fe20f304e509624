"""Processes at most one long body per iteration of the event loop.

Clients whose answers ended in the same engine step send their next requests at the same time. Reading, rendering and
tokenizing them in a row would delay the tokens of all other streams by several milliseconds.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

LONG_BODY_BYTES: Final = 4096
"""A shorter body takes less time to process than an iteration of the event loop."""


class FairYield:
    """Must be used on the event loop. The number of waiters is limited by the number of requests."""

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self, num_bytes: int) -> None:
        """Return in an iteration of the event loop in which no other call for a long body returns, in order."""
        if num_bytes < LONG_BODY_BYTES:
            return
        loop = asyncio.get_running_loop()
        if not self._is_taken:
            self._is_taken = True
            loop.call_soon(self._wake_next)
            return
        waiter = loop.create_future()
        self._waiting.append(waiter)
        await waiter  # if its task is cancelled, the waiter is skipped

    def _wake_next(self) -> None:
        """Wake the next waiter. This runs in the next iteration, after the event loop has polled its sockets."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                asyncio.get_running_loop().call_soon(self._wake_next)
                return
        self._is_taken = False
