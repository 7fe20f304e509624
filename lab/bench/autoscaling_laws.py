"""The laws that `kvloom-lab bench autoscaling` compares."""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from lab.bench.modelled import percentile
from tools.scaler.load import LATE_SHARE, ModelLoad
from tools.scaler.policy import ScalingPolicy, ScalingTargets
from tools.simulate.fleet.scaling import ObservedFleet
from tools.simulate.statistics import Slo
from tools.simulate.workload import Outcome

_NUM_FIRST: Final = 2
"""Shards at midnight."""
_WINDOW_SECONDS: Final = 60.0


class FixedFleet:
    interval_seconds = 3600.0
    start_seconds = 0.0

    def __init__(self, num_shards: int) -> None:
        self.num_first_shards = num_shards

    def wanted(self, fleet: ObservedFleet) -> int:  # noqa: ARG002
        return self.num_first_shards


class BusyShareLaw:
    """Kubernetes' autoscaler with its default behaviour, on the share of time in which a shard computes: target 70%,
    tolerance 10%, up at once by at most 100% or 4 in 15 seconds, down to the most that was wanted within 300 s."""

    interval_seconds = 15.0
    target = 0.7
    tolerance = 0.1
    stabilisation_seconds = 300.0

    def __init__(self, start_seconds: float) -> None:
        self.num_first_shards = _NUM_FIRST
        self.start_seconds = start_seconds
        self._wanted: deque[tuple[float, int]] = deque()

    def wanted(self, fleet: ObservedFleet) -> int:
        present = len(fleet.ready) + fleet.num_starting
        # A shard with any sequence computes all the time.
        busy = sum(shard.num_sequences > 0 for shard in fleet.ready) / max(1, len(fleet.ready))
        ratio = busy / self.target
        wanted = present if abs(ratio - 1) <= self.tolerance else math.ceil(len(fleet.ready) * ratio)
        wanted = min(wanted, max(2 * present, present + 4))
        self._wanted.append((fleet.at, wanted))
        while self._wanted[0][0] <= fleet.at - self.stabilisation_seconds:
            self._wanted.popleft()
        return wanted if wanted > present else min(present, max(number for _, number in self._wanted))


class LatencyLaw:
    """llm-d's law: the larger of P90 TTFT and P90 TPOT, each as a share of its objective. Above 0.55 the fleet grows by
    at most 100% or 4 shards a minute, below 0.40 it shrinks by 1 shard in 2 minutes."""

    interval_seconds = 15.0
    above = 0.55
    below = 0.40
    grow_seconds = 60.0
    shrink_seconds = 120.0

    def __init__(self, start_seconds: float, slo: Slo) -> None:
        self.num_first_shards = _NUM_FIRST
        self.start_seconds = start_seconds
        self._slo = slo
        self._recent: deque[Outcome] = deque()
        self._grew_at = self._shrank_at = -math.inf

    def wanted(self, fleet: ObservedFleet) -> int:
        _keep_recent(self._recent, fleet)
        present = len(fleet.ready) + fleet.num_starting
        ttft, tpot = _latencies(self._recent)
        share = max((ttft or 0.0) / self._slo.ttft_seconds, (tpot or 0.0) / self._slo.tpot_seconds)
        if share > self.above and fleet.at - self._grew_at >= self.grow_seconds:
            self._grew_at = fleet.at
            wanted = math.ceil(present * share / self.above)
            return min(wanted, max(2 * present, present + 4))
        if share < self.below and fleet.at - self._shrank_at >= self.shrink_seconds:
            self._shrank_at = fleet.at
            return max(1, present - 1)
        return present


class KvloomLaw:
    """The policy of `kvloom scaler`, shown what routers know of such shards."""

    interval_seconds = 15.0

    def __init__(self, start_seconds: float, slo: Slo) -> None:
        self.num_first_shards = _NUM_FIRST
        self.start_seconds = start_seconds
        self._policy = ScalingPolicy(ScalingTargets(ttft_seconds=slo.ttft_seconds, tpot_seconds=slo.tpot_seconds))
        self._recent: deque[Outcome] = deque()
        self._computed: deque[tuple[float, int]] = deque([(0.0, 0)])

    def wanted(self, fleet: ObservedFleet) -> int:
        _keep_recent(self._recent, fleet)
        self._computed.append((fleet.at, fleet.num_computed_tokens))
        while len(self._computed) > 2 and self._computed[1][0] <= fleet.at - _WINDOW_SECONDS:
            self._computed.popleft()
        (since, tokens_before), (until, tokens) = self._computed[0], self._computed[-1]
        ttft, tpot = _latencies(self._recent)
        shards = fleet.ready
        loads = [shard.load(0, fleet.at) for shard in shards]
        num_blocks = sum(shard.cache.num_blocks for shard in shards)
        load = ModelLoad(
            num_shards=len(shards),
            kv_usage=1 - sum(one.num_available_blocks for one in loads) / num_blocks if num_blocks else 0.0,
            batch_share=sum(one.num_running for one in loads) / max(1, sum(shard.max_batch for shard in shards)),
            num_queued_requests=fleet.num_queued_requests + sum(one.num_waiting for one in loads),
            num_queued_prefill_tokens=fleet.num_queued_prompt_tokens
            + sum(one.num_queued_prefill_tokens for one in loads),
            prefill_tokens_per_second=sum(one.prefill_tokens_per_second for one in loads),
            computed_tokens_per_second=(tokens - tokens_before) / (until - since),
            ttft_seconds=ttft,
            tpot_seconds=tpot,
        )
        return max(1, self._policy.recommend(load, fleet.at).num_shards)


def _keep_recent(recent: deque[Outcome], fleet: ObservedFleet) -> None:
    recent.extend(fleet.ended)
    while recent and recent[0].finished_at <= fleet.at - _WINDOW_SECONDS:
        recent.popleft()


def _latencies(recent: deque[Outcome]) -> tuple[float | None, float | None]:
    """The slowest of nine in ten: TTFT and TPOT."""
    return (
        percentile((one.ttft_seconds for one in recent), LATE_SHARE),
        percentile((one.tpot_seconds for one in recent if one.call.num_output_tokens > 1), LATE_SHARE),
    )
