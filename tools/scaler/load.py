"""The load of a model's shards at one time, and how it is made of what routers say. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from kvloom.v1.overview_pb2 import GetOverviewResponse, ShardOverview
from kvloom_common.metrics.exposition import samples_in
from kvloom_common.overview.merge import merged

TTFT_METRIC: Final = "kvloom_router_time_to_first_token_seconds"
TPOT_METRIC: Final = "kvloom_router_time_per_output_token_seconds"
LATE_SHARE: Final = 0.9
"""The objectives are those of nine in ten requests."""


class ModelLoad(msgspec.Struct, frozen=True, kw_only=True):
    num_shards: int
    """Those that take requests."""
    kv_usage: float = 0.0
    """The share of their KV blocks that sequences hold."""
    batch_share: float = 0.0
    """The sequences that run, as a share of those that can run at once."""
    num_queued_requests: int = 0
    """In routers, and waiting at shards."""
    num_queued_prefill_tokens: int = 0
    """In routers and at shards."""
    prefill_tokens_per_second: float = 0.0
    """They could compute so many together; 0: not known."""
    computed_tokens_per_second: float = 0.0
    """Prompt tokens that they have computed of late."""
    ttft_seconds: float | None = None
    """Nine in ten of the requests that ended of late were as fast. None: none ended."""
    tpot_seconds: float | None = None

    @property
    def is_idle(self) -> bool:
        """True when nothing waits or runs, and nothing has of late."""
        waits = self.num_queued_requests or self.num_queued_prefill_tokens
        runs = self.batch_share or self.computed_tokens_per_second
        return not (waits or runs) and self.ttft_seconds is None and self.tpot_seconds is None

    @property
    def queued_seconds(self) -> float:
        """How long the shards need for the prompts that wait. 0 if their speed is not known."""
        speed = self.prefill_tokens_per_second
        return self.num_queued_prefill_tokens / speed if speed else 0.0


class RouterAnswer(msgspec.Struct, frozen=True):
    """An answer of one router."""

    overview: GetOverviewResponse
    latencies: Mapping[str, Mapping[tuple[str, float], float]]
    """By metric: how many requests of a model took at most so long, by (model, upper bound), since `incarnation_id`
    started."""
    incarnation_id: str


class FleetReading(msgspec.Struct, frozen=True):
    """The answers of all routers at one time."""

    at_seconds: float
    answers: Sequence[RouterAnswer]


def latencies_in(text: str) -> dict[str, dict[tuple[str, float], float]]:
    """The latencies in the text of RouterService.GetMetrics. Raises ValueError if it is malformed."""
    found: dict[str, dict[tuple[str, float], float]] = {TTFT_METRIC: {}, TPOT_METRIC: {}}
    for sample in samples_in(text):
        name = sample.name.removesuffix("_bucket")
        if name != sample.name and name in found:
            key = (sample.labels.get("model", ""), float(sample.labels["le"]))
            found[name][key] = found[name].get(key, 0.0) + sample.value
    return found


def loads_of(now: FleetReading, before: FleetReading | None) -> dict[str, ModelLoad]:
    """By model. Rates and latencies are those since `before`; without it they are not known."""
    fleet = merged(answer.overview for answer in now.answers)
    queues: dict[str, tuple[int, int]] = {}
    for router in fleet.routers:
        for queue in router.queues:
            requests, tokens = queues.get(queue.model, (0, 0))
            queues[queue.model] = (requests + queue.num_requests, tokens + queue.num_prompt_tokens)
    by_model: dict[str, list[ShardOverview]] = {model: [] for model in queues}
    for shard in fleet.shards:
        by_model.setdefault(shard.model, []).append(shard)
    earlier = {} if before is None else _computed_tokens(before)
    seconds = 0.0 if before is None else now.at_seconds - before.at_seconds
    computed = _computed_tokens(now)
    loads: dict[str, ModelLoad] = {}
    for model, shards in by_model.items():
        ready = [one for one in shards if not (one.draining or one.withdrawn or one.asleep)]
        new = sum(max(0, computed[one.shard_id] - earlier.get(one.shard_id, computed[one.shard_id])) for one in shards)
        blocks = sum(one.num_blocks for one in ready)
        places = sum(one.max_batch for one in ready)
        running = sum(one.num_running for one in ready)
        requests, tokens = queues.get(model, (0, 0))
        loads[model] = ModelLoad(
            num_shards=len(ready),
            kv_usage=1 - sum(one.num_available_blocks for one in ready) / blocks if blocks else 0.0,
            batch_share=running / places if places else 0.0,
            num_queued_requests=requests + sum(one.num_waiting for one in shards),
            num_queued_prefill_tokens=tokens + sum(one.num_queued_prefill_tokens for one in ready),
            prefill_tokens_per_second=sum(one.prefill_tokens_per_second for one in ready),
            computed_tokens_per_second=new / seconds if seconds > 0 else 0.0,
            ttft_seconds=_latency(model, TTFT_METRIC, now, before),
            tpot_seconds=_latency(model, TPOT_METRIC, now, before),
        )
    return loads


def _computed_tokens(reading: FleetReading) -> dict[str, int]:
    """Prompt tokens that were not cached, by shard, since its process started."""
    shards = merged(answer.overview for answer in reading.answers).shards
    return {one.shard_id: one.num_prompt_tokens - one.num_cached_tokens for one in shards}


def _latency(model: str, metric: str, now: FleetReading, before: FleetReading | None) -> float | None:
    """The quantile LATE_SHARE of the requests that ended since `before`, interpolated as Prometheus does. None: there
    are none."""
    if before is None:
        return None
    earlier = {answer.incarnation_id: answer.latencies[metric] for answer in before.answers}
    counts: dict[float, float] = {}
    for answer in now.answers:
        known = earlier.get(answer.incarnation_id, {})
        for (of, bound), count in answer.latencies[metric].items():
            if of == model:
                counts[bound] = counts.get(bound, 0.0) + max(0.0, count - known.get((of, bound), 0.0))
    return quantile(counts.items(), LATE_SHARE)


def quantile(cumulative: Iterable[tuple[float, float]], share: float) -> float | None:
    """The quantile of (upper bound, how many are at most that), of which one bound is infinity. What lies above the
    last finite bound counts as that bound. None: there are none."""
    ordered = sorted(cumulative)
    if not ordered or not ordered[-1][1]:
        return None
    wanted = share * ordered[-1][1]
    if ordered[0][1] >= wanted:
        return ordered[0][0] * wanted / ordered[0][1]
    for (low, below), (high, count) in itertools.pairwise(ordered):
        if count >= wanted:
            return low if high == float("inf") else low + (high - low) * (wanted - below) / (count - below)
    return ordered[-1][0]
