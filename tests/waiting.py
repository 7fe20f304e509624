"""How tests wait for what sends no event: they ask until it is so, and fail when a bound has passed.

Where there is an event, a condition or a virtual clock, tests wait for that. Any other sleep says in a comment why it
is one (tests/unit/test_waiting.py).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

TIMEOUT_SECONDS: Final = 20.0
"""A busy machine is no reason to fail."""
PAUSE_SECONDS: Final = 0.005

T = TypeVar("T")


async def eventually(
    condition: Callable[[], T | Awaitable[T]],
    what: str = "the condition",
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> T:
    """Waits until the condition, which may be awaitable, is true, and returns what it was then. Raises AssertionError,
    which says what was waited for, when it is not in time."""
    try:
        async with asyncio.timeout(timeout_seconds):
            while True:
                found = condition()
                if inspect.isawaitable(found):
                    found = await found
                if found:
                    return found
                await asyncio.sleep(PAUSE_SECONDS)  # sleep: the one way to wait for what sends no event
    except TimeoutError:
        raise AssertionError(f"{what} did not come true within {timeout_seconds:g} s") from None
