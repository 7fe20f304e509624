"""The result cache's metrics, read when they are scraped."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from kvloom_common.metrics.table import CollectorOf
from router import metric_table as table
from router.features.result_cache.cache import ResultCache


def observe(cache: ResultCache, registry: CollectorRegistry) -> None:
    """Shows the counts of a cache in a registry."""

    def collect() -> Iterator[Metric]:
        yield table.RESULT_CACHE_REQUESTS.collected({("hit",): cache.num_hits, ("miss",): cache.num_misses})
        yield table.RESULT_CACHE_ANSWERS.collected(len(cache.memory))
        yield table.RESULT_CACHE_BYTES.collected(cache.memory.num_bytes)
        yield table.RESULT_CACHE_EVICTIONS.collected(cache.memory.num_evicted)

    CollectorOf(registry, collect)
