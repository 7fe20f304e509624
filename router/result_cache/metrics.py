"""The result cache's metrics, read when they are scraped."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from router.result_cache.cache import ResultCache


class ResultCacheMetrics(Collector):
    def __init__(self, cache: ResultCache, registry: CollectorRegistry) -> None:
        self._cache = cache
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        cache = self._cache
        requests = CounterMetricFamily(
            "kvloom_router_result_cache_requests",
            "Requests for which the result cache was asked, by whether it had their answer. Unit: requests.",
            labels=["outcome"],
        )
        requests.add_metric(["hit"], cache.num_hits)
        requests.add_metric(["miss"], cache.num_misses)
        yield requests
        yield GaugeMetricFamily(
            "kvloom_router_result_cache_answers", "Answers that are kept now. Unit: answers.", len(cache.memory)
        )
        yield GaugeMetricFamily(
            "kvloom_router_result_cache_bytes",
            "What the kept answers take in memory. Unit: bytes.",
            cache.memory.num_bytes,
        )
        yield CounterMetricFamily(
            "kvloom_router_result_cache_evictions",
            "Answers that were dropped before their time because others needed the room. Unit: answers.",
            cache.memory.num_evicted,
        )
