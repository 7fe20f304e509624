"""Detects a dead or hanging engine.

In 1.2.1 TensorRT-LLM's own health check only reports that it has not been shut down: a worker that has crashed or hangs
still counts as healthy. So tokens and iterations are watched while there is work, and a one-token request is made while
there is none. It is also made after several failed requests in a row, because an exception of a forward pass becomes an
error of every request, and the engine accepts the next ones.

A request may also raise what is none of the library's errors of requests: when its output is read, the library asserts
things of this one request. It proves nothing of the engine either, so a probe is made at once. Only if many different
requests have failed so before it, or any other answer, succeeds, the engine counts as dead without one. A client's own
bad requests thus cost a probe, and no engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import Callable
from typing import Final

import structlog

from kvloom_common.config import TensorRtLlmConfig
from shard_server.engines.base import EngineError
from shard_server.engines.tensorrt_llm.api import Llm, RequestOutput
from shard_server.engines.tensorrt_llm.daemon_thread import call_in_daemon

log = structlog.get_logger()

START_SECONDS: Final = 3600.0
"""How long the library may take to start, and the first request, which compiles what it lacks."""


class HealthVerdict(enum.Enum):
    WELL = enum.auto()
    PROBE = enum.auto()
    """For a while nothing has shown that the engine can generate, or it has failed many requests: a probe is due."""
    STALLED = enum.auto()
    """The engine has work and makes no progress."""


class WatchSettings(TensorRtLlmConfig):
    stall_timeout_seconds: float = 120.0
    """An engine that has work and makes no progress for this long counts as dead."""
    probe_interval_seconds: float = 30.0
    """How often an idle engine generates one token, to show that it still can."""
    probe_timeout_seconds: float = 30.0
    max_failed_requests: int = 8
    """After so many requests in a row that TensorRT-LLM has failed, it must generate one token to count as alive. After
    so many different ones in a row whose failure was none of its own kind of errors, it counts as dead."""
    loop_timeout_seconds: float = 60.0
    """When TensorRT-LLM blocks the shard's event loop for this long, the process ends."""
    cancel_timeout_seconds: float = 10.0
    """A cancelled sequence that TensorRT-LLM does not end within this time is cut off."""
    unread_timeout_seconds: float = 30.0
    """When the engine's output is not read for this long, its sequences are aborted."""


class ProgressWatch:
    """Judges by the times of progress, and by `max_failed_requests` in a row. Pure; times in seconds of one clock."""

    def __init__(
        self, probe_interval_seconds: float, stall_timeout_seconds: float, max_failed_requests: int, now: float
    ) -> None:
        self._max_failed_requests = max_failed_requests
        self._num_failed = 0
        self._probe_interval_seconds = probe_interval_seconds
        self._stall_timeout_seconds = stall_timeout_seconds
        self._progress_at = now
        self._num_records = 0
        self._unexplained: set[int] = set()
        """The requests that have failed since the last good answer, by what they asked for."""
        self._is_doubtful = False

    def on_progress(self, now: float) -> None:
        """A token arrived or a probe succeeded."""
        self._progress_at = now

    def on_request_end(self, *, failed: bool) -> None:
        """TensorRT-LLM has ended a request, by an error or otherwise. Cancelled requests say nothing."""
        self._num_failed = self._num_failed + 1 if failed else 0
        if not failed:
            self._unexplained.clear()

    def on_unexplained_failure(self, asked: int) -> None:
        """A request has failed, and not by an error of the library's own kind. `asked` is equal for requests that ask
        for the same."""
        self._unexplained.add(asked)
        self._is_doubtful = True

    @property
    def is_failing(self) -> bool:
        """True when many different requests have failed in a row, and not by errors of their own."""
        return len(self._unexplained) >= self._max_failed_requests

    def on_probe_passed(self, now: float) -> None:
        self._progress_at = now
        self._unexplained.clear()

    def judge(self, now: float, *, is_busy: bool, num_records: int) -> HealthVerdict:
        """`num_records` is the number of iteration statistics so far; a long prefill produces those but no token."""
        if num_records != self._num_records:
            self._num_records = num_records
            self._progress_at = now
        if self._num_failed >= self._max_failed_requests or self._is_doubtful:
            self._num_failed = 0
            self._is_doubtful = False
            return HealthVerdict.PROBE
        since = now - self._progress_at
        if is_busy:
            return HealthVerdict.STALLED if since >= self._stall_timeout_seconds else HealthVerdict.WELL
        return HealthVerdict.PROBE if since >= self._probe_interval_seconds else HealthVerdict.WELL

    def on_work(self, now: float) -> None:
        """An idle engine has received work: the stall timeout starts now."""
        self._progress_at = max(self._progress_at, now)


async def probe(submit: Callable[[], RequestOutput], timeout_seconds: float) -> None:
    """Generate one token. Raises EngineError if that fails; a token that is late is aborted."""
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


async def ask(llm: Llm) -> bool:
    """Ask the library's own check, which in newer versions has an error budget. Returns whether it has answered; raises
    EngineError if the answer is no."""
    check = getattr(llm, "_check_health", None)
    if check is None:
        return False
    try:
        is_healthy = await call_in_daemon("tensorrt-llm-health", check)
    except Exception as error:
        log.warning("trtllm_health_check_failed", error=repr(error))
        return False
    if not is_healthy:
        raise EngineError("TensorRT-LLM's own health check fails")
    return True


def abort(output: RequestOutput) -> None:
    """Abort a request. Errors are ignored: the call goes through a weak reference that may be dead."""
    with contextlib.suppress(Exception):
        output.abort()
