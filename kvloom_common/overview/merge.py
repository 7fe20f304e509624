"""The overviews of several routers as one. Every router sees all shards; each has its own requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from kvloom.v1.overview_pb2 import FleetSample, GetOverviewResponse, RequestOverview, ShardOverview

SAME_TIME_SECONDS = 5.0
"""Samples of different routers within one such interval become one."""


@dataclasses.dataclass(frozen=True, slots=True)
class FleetOverview:
    routers: Sequence[GetOverviewResponse]
    """By id; what the other fields have is also here."""
    shards: Sequence[ShardOverview]
    """By id."""
    running: Sequence[RequestOverview]
    """Those first that arrived first."""
    ended: Sequence[RequestOverview]
    """Those first that arrived last."""
    samples: Sequence[FleetSample]
    """In the order of time."""


def merged(answers: Iterable[GetOverviewResponse]) -> FleetOverview:
    routers = sorted(answers, key=lambda one: one.router_id)
    shards: dict[str, ShardOverview] = {}
    for router in routers:
        for shard in router.shards:
            known = shards.get(shard.shard_id)
            if known is None or shard.num_output_tokens > known.num_output_tokens:  # the later report
                shards[shard.shard_id] = shard
    return FleetOverview(
        routers,
        [shards[name] for name in sorted(shards)],
        sorted((one for router in routers for one in router.running), key=lambda one: one.arrived_at_seconds),
        sorted((one for router in routers for one in router.ended), key=lambda one: -one.arrived_at_seconds),
        _samples(routers),
    )


def _samples(routers: Sequence[GetOverviewResponse]) -> list[FleetSample]:
    if len(routers) == 1:
        return list(routers[0].samples)
    by_time: dict[int, list[FleetSample]] = {}
    for router in routers:
        for sample in router.samples:
            by_time.setdefault(int(sample.at_seconds // SAME_TIME_SECONDS), []).append(sample)
    return [_one_sample(by_time[at]) for at in sorted(by_time)]


def _one_sample(samples: Sequence[FleetSample]) -> FleetSample:
    """Reports of shards are the same at every router that is connected to all of them; counts of routers add up."""
    one = FleetSample(
        at_seconds=max(sample.at_seconds for sample in samples),
        num_queued=sum(sample.num_queued for sample in samples),
        num_ended=sum(sample.num_ended for sample in samples),
        num_failed=sum(sample.num_failed for sample in samples),
        ttft_counts=[sum(counts) for counts in zip(*(sample.ttft_counts for sample in samples), strict=True)],
    )
    for name in (
        "num_running",
        "num_waiting",
        "kv_usage",
        "output_tokens_per_second",
        "prompt_tokens_per_second",
        "hit_rate",
    ):
        setattr(one, name, max(getattr(sample, name) for sample in samples))
    return one
