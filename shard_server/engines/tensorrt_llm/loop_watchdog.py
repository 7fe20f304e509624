"""Ends the process when its event loop stands still.

TensorRT-LLM may block the loop for ever: submitting is a plain function, and after a failure of its workers it shuts
itself down from the coroutine that reads a response, which waits for processes that may hang. Nothing that runs on the
loop can detect this, and no Python thread can while the library holds the interpreter's lock. The timer of faulthandler
runs outside of both.
"""

from __future__ import annotations

import asyncio
import faulthandler
from typing import Final

_STDERR: Final = 2
_BEATS_PER_TIMEOUT: Final = 4


class LoopWatchdog:
    """Once the loop has not run for `timeout_seconds`, all threads' stacks are written to the standard error output and
    the process ends with status 1, upon which a supervisor restarts it. There is one such timer per process."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._next_beat: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Called on the loop that is watched."""
        faulthandler.dump_traceback_later(self._timeout_seconds, exit=True, file=_STDERR)
        interval_seconds = self._timeout_seconds / _BEATS_PER_TIMEOUT
        self._next_beat = asyncio.get_running_loop().call_later(interval_seconds, self.start)

    def stop(self) -> None:
        """The process is no longer ended."""
        if self._next_beat is not None:
            self._next_beat.cancel()
            self._next_beat = None
            faulthandler.cancel_dump_traceback_later()

    def give_up(self) -> None:
        """The process ends within `timeout_seconds` in any case: something in it cannot be stopped."""
        if self._next_beat is not None:
            self._next_beat.cancel()
            self._next_beat = None
            faulthandler.dump_traceback_later(self._timeout_seconds, exit=True, file=_STDERR)
