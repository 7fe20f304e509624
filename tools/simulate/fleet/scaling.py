"""A modelled fleet whose number of shards changes: what decides, what it is shown, and what the shards cost.

A shard takes `start_seconds` from the decision until it takes requests, with an empty cache. One that is not needed
gets nothing new, and ends with its last sequence. Its hours count from the decision that starts it to its end.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from tools.simulate.fleet.shard import SimShard
from tools.simulate.workload import Outcome


class ObservedFleet(msgspec.Struct, frozen=True, kw_only=True):
    """The view of the fleet that a scaler gets."""

    at: float
    ready: Sequence[SimShard]
    num_starting: int
    num_queued_requests: int
    """Those that wait in routers."""
    num_queued_prompt_tokens: int
    num_computed_tokens: int
    """Prompt tokens that were not cached, of all calls that have ended."""
    ended: Sequence[Outcome]
    """The calls that have ended since the decision before."""


class FleetScaler(Protocol):
    num_first_shards: int
    interval_seconds: float
    start_seconds: float

    def wanted(self, fleet: ObservedFleet) -> int:
        """How many shards there should be, of those that the fleet may have."""
        ...


class ShardPhase(enum.Enum):
    OFF = enum.auto()
    STARTING = enum.auto()
    READY = enum.auto()
    DRAINING = enum.auto()


class ScaledFleet:
    """Knows which shards run. The caller carries out what `decide` returns."""

    def __init__(self, scaler: FleetScaler, shards: list[SimShard], new_shard: Callable[[int], SimShard]) -> None:
        self.scaler = scaler
        self._shards = shards
        self._new_shard = new_shard
        self._phases = [ShardPhase.READY if index < scaler.num_first_shards else ShardPhase.OFF for index in self._all]
        self._began_at = [0.0 for _ in shards]
        self._num_seen = 0
        self._num_computed_tokens = 0
        self.shard_seconds = 0.0
        """Those of shards that have ended."""
        self.counts: list[tuple[float, int]] = [(0.0, scaler.num_first_shards)]
        """(time, shards that run), whenever their number was decided anew."""
        for index, shard in enumerate(shards):
            shard.is_connected = self._phases[index] is ShardPhase.READY

    @property
    def _all(self) -> range:
        return range(len(self._shards))

    def with_phase(self, *phases: ShardPhase) -> list[int]:
        return [index for index in self._all if self._phases[index] in phases]

    def decide(
        self, now: float, outcomes: Sequence[Outcome], num_queued: int, num_queued_tokens: int
    ) -> tuple[list[int], list[int]]:
        """Returns the shards that start to start now, and those that start to drain."""
        ended = outcomes[self._num_seen :]
        self._num_seen = len(outcomes)
        self._num_computed_tokens += sum(one.call.num_prompt_tokens - one.num_cached_tokens for one in ended)
        ready, starting = self.with_phase(ShardPhase.READY), self.with_phase(ShardPhase.STARTING)
        wanted = self.scaler.wanted(
            ObservedFleet(
                at=now,
                ready=[self._shards[index] for index in ready],
                num_starting=len(starting),
                num_queued_requests=num_queued,
                num_queued_prompt_tokens=num_queued_tokens,
                num_computed_tokens=self._num_computed_tokens,
                ended=ended,
            )
        )
        missing = min(max(wanted, 1), len(self._shards)) - len(ready) - len(starting)
        begun = self.with_phase(ShardPhase.OFF)[: max(0, missing)]
        for index in begun:
            self._phases[index], self._began_at[index] = ShardPhase.STARTING, now
        # Those that have not started yet cost nothing to stop; then those with the least to do.
        by_load = sorted(ready, key=lambda index: (self._shards[index].num_sequences, -index))
        ending = (starting[::-1] + by_load)[: max(0, -missing)]
        for index in ending:
            if self._phases[index] is ShardPhase.STARTING:
                self._end(index, now)
            else:
                self._phases[index] = ShardPhase.DRAINING
                self._shards[index].is_draining = True
        self.counts.append((now, sum(phase is not ShardPhase.OFF for phase in self._phases)))
        return begun, [index for index in ending if self._phases[index] is ShardPhase.DRAINING]

    def start(self, index: int, now: float) -> bool:
        """The shard has started, unless it was stopped meanwhile. It replaces the one of this index."""
        if self._phases[index] is not ShardPhase.STARTING or now < self._began_at[index] + self.scaler.start_seconds:
            return False
        self._phases[index] = ShardPhase.READY
        self._shards[index] = self._new_shard(index)
        return True

    def end_idle(self, now: float) -> list[int]:
        """The shards that drain and are empty end now."""
        idle = [one for one in self.with_phase(ShardPhase.DRAINING) if not self._shards[one].num_sequences]
        for index in idle:
            self._end(index, now)
            self._shards[index].is_connected = False
        return idle

    def finish(self, now: float) -> None:
        for index in self.with_phase(ShardPhase.STARTING, ShardPhase.READY, ShardPhase.DRAINING):
            self._end(index, now)

    def _end(self, index: int, now: float) -> None:
        self._phases[index] = ShardPhase.OFF
        self.shard_seconds += now - self._began_at[index]
