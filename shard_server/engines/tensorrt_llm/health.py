"""Is the engine alive? TensorRT-LLM's own health check only says that nobody has shut it down: a worker that crashed or
hangs keeps looking well. So tokens and iterations are watched while there is work, and a one-token request is made when
there is none.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import Callable

from shard_server.engines.base import EngineError
from shard_server.engines.tensorrt_llm.api import RequestOutput


class Verdict(enum.Enum):
    WELL = enum.auto()
    PROBE = enum.auto()
    """Nothing has shown for a while that it can generate."""
    STALLED = enum.auto()
    """It has work and makes no progress."""


class ProgressWatch:
    """Judges by the times of progress. Pure; times in seconds of one clock."""

    def __init__(self, probe_interval_seconds: float, stall_timeout_seconds: float, now: float) -> None:
        self._probe_interval_seconds = probe_interval_seconds
        self._stall_timeout_seconds = stall_timeout_seconds
        self._progress_at = now
        self._num_records = 0

    def on_progress(self, now: float) -> None:
        """A token came, or a probe succeeded."""
        self._progress_at = now

    def judge(self, now: float, *, is_busy: bool, num_records: int) -> Verdict:
        """`num_records`: iteration statistics so far; a long prefill brings those and no token."""
        if num_records != self._num_records:
            self._num_records = num_records
            self._progress_at = now
        since = now - self._progress_at
        if is_busy:
            return Verdict.STALLED if since >= self._stall_timeout_seconds else Verdict.WELL
        return Verdict.PROBE if since >= self._probe_interval_seconds else Verdict.WELL

    def on_work(self, now: float) -> None:
        """The engine was idle and is given work: only from now on can it owe progress."""
        self._progress_at = max(self._progress_at, now)


async def probe(submit: Callable[[], RequestOutput], timeout_seconds: float) -> None:
    """One token, or EngineError. What does not come in time is aborted."""
    try:
        output = submit()
    except Exception as error:
        raise EngineError(f"the engine takes no request: {error!r}") from error
    try:
        async with asyncio.timeout(timeout_seconds):
            while not output.finished:
                await anext(output)
    except TimeoutError as error:
        abort(output)
        raise EngineError(f"the engine gave no token within {timeout_seconds:g} s") from error
    except StopAsyncIteration as error:
        raise EngineError("the engine ended a request without a finish") from error
    except Exception as error:
        raise EngineError(f"the engine failed a one-token request: {error!r}") from error


def abort(output: RequestOutput) -> None:
    """Ask for the end of a request. The call reaches through a weak reference that may be dead."""
    with contextlib.suppress(Exception):
        output.abort()
