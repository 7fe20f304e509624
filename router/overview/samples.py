"""Samples of the fleet over the last hour, for charts without Prometheus. A sample is one pass over the shards, every
few seconds; no request and no token pays for it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from kvloom.v1.overview_pb2 import FleetSample
from router.core.events import ShardLoad
from router.core.fleet.fleet import ShardState

SAMPLE_SECONDS: Final = 5.0
NUM_SAMPLES: Final = int(3600 / SAMPLE_SECONDS)


class RequestCounts(msgspec.Struct, frozen=True):
    """Counts of a router since its start."""

    num_queued: int
    """How many requests wait now."""
    num_ended: int
    num_failed: int
    ttft_counts: Sequence[int]
    """By the buckets of LATENCY_SECONDS."""


class FleetSamples:
    """A ring of samples. `run` takes them."""

    def __init__(
        self,
        shards: Callable[[], Sequence[ShardState]],
        counts: Callable[[], RequestCounts],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock` returns Unix seconds."""
        self._shards = shards
        self._counts = counts
        self._clock = clock
        self._ring: deque[FleetSample] = deque(maxlen=NUM_SAMPLES)
        self._taken_at: float | None = None
        self._loads: dict[str, tuple[str, ShardLoad]] = {}
        """(incarnation, load) of each shard in the sample before."""
        self._last = counts()
        self.output_rates: dict[str, float] = {}
        """Output tokens per second of each shard, between the two latest samples."""

    async def run(self) -> None:
        while True:
            self.take()
            await asyncio.sleep(SAMPLE_SECONDS)

    def since(self, after: float) -> Iterator[FleetSample]:
        """Those after this time, in Unix seconds."""
        return (sample for sample in self._ring if sample.at_seconds > after)

    def take(self) -> None:
        """Add a sample. The first one only begins to count."""
        now, shards, counts = self._clock(), self._shards(), self._counts()
        before, last, loads = self._taken_at, self._last, self._loads
        self._taken_at, self._last = now, counts
        self._loads = {one.description.shard_id: (one.description.incarnation_id, one.load) for one in shards}
        if before is None or now <= before:
            return
        seconds = now - before
        totals = [0, 0, 0]
        self.output_rates = {}
        for shard_id, (incarnation_id, load) in self._loads.items():
            incarnation_before, load_before = loads.get(shard_id, (incarnation_id, load))
            if incarnation_before != incarnation_id:
                load_before = ShardLoad()  # another process, which has counted from zero
            new = _tokens(load, load_before)
            totals = [total + more for total, more in zip(totals, new, strict=True)]
            self.output_rates[shard_id] = new[2] / seconds
        num_prompt, num_cached, num_output = totals
        num_blocks = sum(one.description.num_blocks for one in shards)
        num_available = sum(one.load.num_available_blocks for one in shards)
        self._ring.append(
            FleetSample(
                at_seconds=now,
                num_running=sum(one.load.num_running for one in shards),
                num_waiting=sum(one.load.num_waiting for one in shards),
                num_queued=counts.num_queued,
                kv_usage=max(0.0, 1.0 - num_available / num_blocks) if num_blocks else 0.0,
                output_tokens_per_second=num_output / seconds,
                prompt_tokens_per_second=num_prompt / seconds,
                hit_rate=num_cached / num_prompt if num_prompt else 0.0,
                num_ended=counts.num_ended - last.num_ended,
                num_failed=counts.num_failed - last.num_failed,
                ttft_counts=[new - old for new, old in zip(counts.ttft_counts, last.ttft_counts, strict=True)],
            )
        )


def _tokens(load: ShardLoad, before: ShardLoad) -> tuple[int, int, int]:
    """New tokens: of prompts, cached ones of them, and of output. Never below 0, whatever a shard reports."""
    return (
        max(0, load.num_prompt_tokens - before.num_prompt_tokens),
        max(0, load.num_cached_tokens - before.num_cached_tokens),
        max(0, load.num_output_tokens - before.num_output_tokens),
    )
