"""One router core among modelled shards: what it is told, when, and how long it thinks about it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from router.core import events as ev
from router.core.actions import Action
from router.core.core import CoreConfig, RouterCore
from tools.simulate.fleet.shard import SimShard

CONTEXT_GROWTH_WORTH_TELLING = 0.01
"""Decode alone makes a shard's load newsworthy once its context has grown by this share."""


class RouterLink:
    """Keeps the books of what this router was last told of each shard's load."""

    def __init__(self, index: int, config: CoreConfig, seed: int, shards: Sequence[SimShard]) -> None:
        self.index = index
        self.core = RouterCore(config, seed=seed)
        self.cpu_nanoseconds = 0
        self.num_events = 0
        self.tick_at: float | None = None
        """When a Tick is due that has been scheduled already."""
        self._shards = shards
        self._told_changes = [-1] * len(shards)
        self._told_again_at = [0.0] * len(shards)

    def handle(self, event: ev.Event, now: float) -> list[Action]:
        began = time.thread_time_ns()
        actions = self.core.handle(event, now)
        self.cpu_nanoseconds += time.thread_time_ns() - began
        self.num_events += 1
        return actions

    def take_reports(self, now: float) -> list[ev.LoadReported]:
        """Of all shards whose load has changed since their last report was taken."""
        reports: list[ev.LoadReported] = []
        told_changes, told_again_at = self._told_changes, self._told_again_at
        for index, shard in enumerate(self._shards):
            if shard.num_changes == told_changes[index] and now < told_again_at[index]:
                continue
            told_changes[index] = shard.num_changes
            told_again_at[index] = now + shard.seconds_until_growth(CONTEXT_GROWTH_WORTH_TELLING)
            reports.append(ev.LoadReported(shard.shard_id, shard.load(self.index, now)))
        return reports
