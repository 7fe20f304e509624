"""How long a resumable answer waits for its client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class GraceTimer:
    """Runs while nobody reads; calls `on_expired` at its end, from the event loop."""

    __slots__ = ("_on_expired", "_seconds", "_timer")

    def __init__(self, seconds: float, on_expired: Callable[[], None]) -> None:
        self._seconds = seconds
        self._on_expired = on_expired
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """From the beginning."""
        self._run(self._seconds)

    def expire_soon(self) -> None:
        """In the next turn of the event loop: the caller may be in the middle of an event."""
        self._run(0)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        """For good. Lets go of whom it would call, who most likely holds it: else both would stay until the garbage
        collector comes."""
        self.stop()
        self._on_expired = _nobody

    def _run(self, seconds: float) -> None:
        self.stop()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._expire)

    def _expire(self) -> None:
        self._timer = None
        self._on_expired()


def _nobody() -> None:
    """Whoever closed the clock is not to be called."""
