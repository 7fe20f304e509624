"""Long bodies are worked on one a turn of the event loop.

Clients whose answers ended in the same engine step send their next requests at the same time. Reading, rendering and
tokenizing them in a row would keep all other streams' tokens waiting for several milliseconds.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

LONG_BODY_BYTES: Final = 4096
"""A shorter one takes less time than the turn."""


class FairYield:
    """Lives on the event loop. As many wait as there are requests, which are limited."""

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self, num_bytes: int) -> None:
        """Return in a turn in which nobody else with a long body returns, in the order of the calls."""
        if num_bytes < LONG_BODY_BYTES:
            return
        loop = asyncio.get_running_loop()
        if not self._is_taken:
            self._is_taken = True
            loop.call_soon(self._pass_on)
            return
        waiter = loop.create_future()
        self._waiting.append(waiter)
        await waiter  # cancelled with its task, and then passed over

    def _pass_on(self) -> None:
        """In the next turn, after the sockets have been looked at."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                asyncio.get_running_loop().call_soon(self._pass_on)
                return
        self._is_taken = False
