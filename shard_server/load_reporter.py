"""The engine's load as it is reported to routers: rarely while it changes gradually, and at once when the engine
becomes busy or idle.

Each router's report includes the part of the counts that came over its own stream, so that the router can compute what
other routers have placed. Sequences that were submitted but that the engine has not picked up yet count as waiting: a
step can last long, and other routers must not consider the shard idle in the meantime.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

from kvloom.v1.shard_service_pb2 import LoadReport
from shard_server.engines.base import EngineInfo, EngineLoad, EngineRequest, LoadShare

LOAD_REPORT_SECONDS: Final = 0.05
"""Short against the 0.5 s at which a stale view of other routers' work begins to cost, and long enough that the reports
of hundreds of shards are a few per cent of a router's time."""

MIN_LEFT_SECONDS: Final = 0.001
"""A time that is over is reported as this, because 0 would mean that there is none."""
_NO_SHARE: Final = LoadShare()


class LoadReporter:
    """Keeps the newest load. The shard server sets `draining`, `hand_over`, `withdrawn`, `asleep` and `empty_at`, which
    are part of every report."""

    def __init__(self, info: EngineInfo, clock: Callable[[], float] = time.monotonic) -> None:
        self.draining = False
        self.hand_over = False
        self.withdrawn = False
        self.asleep = False
        self.num_prompt_tokens = self.num_cached_tokens = self.num_output_tokens = 0
        """Since the start of the process; see LoadReport."""
        self.empty_at: float | None = None
        """When it has to be empty while it drains, by the clock; None: it need not be."""
        self._clock = clock
        self._reported_at = float("-inf")
        self._reported_idle = True
        self.restart(info)

    def restart(self, info: EngineInfo) -> None:
        """Begin with another engine, which has no sequence."""
        # Routers that knew no speeds could mistake the first prefill of a slow engine for a stall.
        self._load = EngineLoad(
            num_available_blocks=info.num_blocks,
            prefill_tokens_per_second=info.prefill_tokens_per_second,
            decode_step_seconds=info.decode_step_seconds,
        )
        self._num_blocks = info.num_blocks
        self._num_submitted = 0
        self._in_flight: deque[tuple[int, int]] = deque()
        """(origin, number of prefill tokens) of the sequences that the newest load does not count yet."""
        self._reported_all_submits = True
        """True when the last reports included every submit."""

    def on_submit(self, request: EngineRequest) -> None:
        """The engine has accepted a sequence."""
        self._num_submitted += 1
        self._in_flight.append((request.origin, request.num_expected_prefill_tokens))
        self._reported_all_submits = False

    @property
    def num_submitted(self) -> int:
        """The sequences that the engine has accepted."""
        return self._num_submitted

    def on_step(self, load: EngineLoad, now: float) -> bool:
        """Store the load of a step. Returns True if reports are due: LOAD_REPORT_SECONDS have passed since the previous
        ones, or the engine has become busy or idle."""
        self._load = load
        while len(self._in_flight) > self._num_submitted - load.num_submitted:
            self._in_flight.popleft()
        is_idle = not (load.num_running or load.num_waiting or self._in_flight)
        if is_idle == self._reported_idle and now - self._reported_at < LOAD_REPORT_SECONDS:
            return False
        self._on_due(is_idle, now)
        return True

    def seconds_to_next(self, now: float) -> float:
        """Seconds until submits since the last reports may be reported without waiting for a step."""
        return max(0.0, self._reported_at + LOAD_REPORT_SECONDS - now)

    def is_due_without_step(self, now: float) -> bool:
        """Returns True when submits are still unreported because no step has ended since. After True, the caller
        reports now."""
        if self._reported_all_submits:
            return False
        self._on_due(is_idle=False, now=now)
        return True

    def report(self, origin: int | None = None) -> LoadReport:
        """The report for the stream `origin`; without an origin, the reader's own counts are 0."""
        load = self._load
        own = _NO_SHARE if origin is None else load.shares.get(origin, _NO_SHARE)
        num_in_flight_tokens = num_own_in_flight = num_own_in_flight_tokens = 0
        for submitter, num_tokens in self._in_flight:
            num_in_flight_tokens += num_tokens
            if submitter == origin:
                num_own_in_flight += 1
                num_own_in_flight_tokens += num_tokens
        report = LoadReport(
            num_running=load.num_running,
            num_waiting=load.num_waiting + len(self._in_flight),
            num_queued_prefill_tokens=load.num_queued_prefill_tokens + num_in_flight_tokens,
            num_decode_context_tokens=load.num_decode_context_tokens,
            num_available_blocks=load.num_available_blocks,
            num_blocks=self._num_blocks,
            prefill_tokens_per_second=load.prefill_tokens_per_second,
            decode_step_seconds=load.decode_step_seconds,
            num_preemptions=load.num_preemptions,
            draining=self.draining,
            hand_over=self.hand_over,
            withdrawn=self.withdrawn,
            asleep=self.asleep,
            num_own_running=own.num_running,
            num_own_waiting=own.num_waiting + num_own_in_flight,
            num_own_queued_prefill_tokens=own.num_queued_prefill_tokens + num_own_in_flight_tokens,
            num_own_decode_context_tokens=own.num_decode_context_tokens,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_output_tokens=self.num_output_tokens,
        )
        if self.empty_at is not None:
            report.empty_within_seconds = max(MIN_LEFT_SECONDS, self.empty_at - self._clock())
        return report

    def _on_due(self, is_idle: bool, now: float) -> None:
        self._reported_idle = is_idle
        self._reported_at = now
        self._reported_all_submits = True
