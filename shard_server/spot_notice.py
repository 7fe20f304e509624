"""Notice that this shard's machine is about to be taken away: a file that a node agent writes, or SIGUSR2."""

from __future__ import annotations

import asyncio
import math
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

log = structlog.get_logger()

POLL_SECONDS: Final = 0.1
"""Short against the shortest notices that are given."""
MAX_FILE_BYTES: Final = 1024


class SpotNotices:
    """`path`: the file; "" for none. `default_seconds` is how long the machine stays after a notice that does not say
    it. Call `listen` on the event loop to take SIGUSR2 for a notice, too."""

    def __init__(self, path: str, default_seconds: float, clock: Callable[[], float] = time.time) -> None:
        self._path = Path(path) if path else None
        self._default_seconds = default_seconds
        self._clock = clock
        self._signalled = asyncio.Event()

    def listen(self) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, self._signalled.set)

    async def wait(self) -> float:
        """Return when a notice has come, with the seconds that are left."""
        if self._path is None:
            await self._signalled.wait()
            return self._default_seconds
        stale: float | None = None
        """When a file was written whose time had passed before it was seen."""
        while not self._signalled.is_set():
            found = await asyncio.to_thread(_read, self._path)
            if found is not None and found[1] != stale:
                text, written_at = found
                seconds = seconds_left(text, written_at, self._clock(), self._default_seconds)
                if seconds > 0:
                    return seconds
                log.warning("spot_notice_expired", file=str(self._path))
                stale = written_at
            try:
                async with asyncio.timeout(POLL_SECONDS):
                    await self._signalled.wait()
            except TimeoutError:
                continue
        return self._default_seconds


def seconds_left(text: str, written_at: float, now: float, default_seconds: float) -> float:
    """Returns the seconds that are left of a notice that was written at `written_at`: `text` is the number of seconds
    that it gives. Any other text is a notice of `default_seconds`: not to heed it would be worse than to guess.
    Negative when the time has passed."""
    try:
        given = float(text)
    except ValueError:
        given = math.nan
    if not 0 <= given < math.inf:
        given = default_seconds
    return written_at + given - now


def _read(path: Path) -> tuple[str, float] | None:
    """The file's text, and when it was written; None: there is none."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES).decode(errors="replace").strip(), path.stat().st_mtime
    except OSError:
        return None
