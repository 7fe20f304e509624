"""The engine's load as routers are told it: rarely while it changes little by little, at once when it matters."""

from __future__ import annotations

from typing import Final

from kvloom.v1.shard_service_pb2 import LoadReport
from shard_server.engines.base import EngineLoad

LOAD_REPORT_SECONDS: Final = 0.05


class LoadReporter:
    """Keeps the newest load. `draining` is the shard's own and part of every report."""

    def __init__(self, num_blocks: int) -> None:
        self.draining = False
        self.load = EngineLoad(num_available_blocks=num_blocks)
        self._num_blocks = num_blocks
        self._reported_at = float("-inf")
        self._reported_idle = True

    def on_step(self, load: EngineLoad, now: float) -> LoadReport | None:
        """Takes the load of a step; returns a report if one is due: LOAD_REPORT_SECONDS after the one before, or when
        the engine has become busy or idle."""
        self.load = load
        is_idle = not (load.num_running or load.num_waiting)
        if is_idle == self._reported_idle and now - self._reported_at < LOAD_REPORT_SECONDS:
            return None
        self._reported_idle = is_idle
        self._reported_at = now
        return self.report()

    def report(self) -> LoadReport:
        load = self.load
        return LoadReport(
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            num_queued_prefill_tokens=load.num_queued_prefill_tokens,
            num_decode_context_tokens=load.num_decode_context_tokens,
            num_available_blocks=load.num_available_blocks,
            num_blocks=self._num_blocks,
            prefill_tokens_per_second=load.prefill_tokens_per_second,
            decode_step_seconds=load.decode_step_seconds,
            num_preemptions=load.num_preemptions,
            draining=self.draining,
        )
