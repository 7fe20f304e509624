"""A simulated router: one real core, the load that was last reported to it for each shard, and the core's CPU time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from router.core import events as ev
from router.core.actions import Action
from router.core.core import CoreConfig, RouterCore
from router.core.tenancy.limiter import Limiter
from tools.simulate.fleet.shard import SimShard

MIN_REPORTED_CONTEXT_GROWTH: Final = 0.01
"""When only decoding changes the load of a shard, it is reported again after its context has grown by this share."""


class SimulatedRouter:
    """One router core. Tracks the load that was last reported to it for each shard, and the CPU time of the core."""

    def __init__(
        self, index: int, config: CoreConfig, seed: int, shards: Sequence[SimShard], limiter: Limiter | None
    ) -> None:
        self.index = index
        self.name = f"router-{index}"
        self.core = RouterCore(config, seed=seed, limiter=limiter)
        self.cpu_nanoseconds = 0
        self.num_events = 0
        self.tick_at: float | None = None
        """The time of the scheduled Tick."""
        self._shards = shards
        self._reported_changes = [-1] * len(shards)
        self._next_reports_at = [0.0] * len(shards)

    def handle(self, event: ev.Event, now: float) -> list[Action]:
        began = time.thread_time_ns()
        actions = self.core.handle(event, now)
        self.cpu_nanoseconds += time.thread_time_ns() - began
        self.num_events += 1
        return actions

    def take_reports(self, now: float) -> list[ev.LoadReported]:
        """Load reports of all shards whose load has changed since their last report."""
        reports: list[ev.LoadReported] = []
        reported_changes, next_report_at = self._reported_changes, self._next_reports_at
        for index, shard in enumerate(self._shards):
            if not shard.is_connected or (shard.num_changes == reported_changes[index] and now < next_report_at[index]):
                continue
            reported_changes[index] = shard.num_changes
            next_report_at[index] = now + shard.seconds_until_growth(MIN_REPORTED_CONTEXT_GROWTH)
            reports.append(ev.LoadReported(shard.shard_id, shard.load(self.index, now)))
        return reports

    def forget_reports(self, index: int) -> None:
        """Another shard has taken the place of this one."""
        self._reported_changes[index], self._next_reports_at[index] = -1, 0.0
