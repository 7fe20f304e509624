"""Tables of metrics: one record says all of a metric, and its objects and its line of docs/reference/metrics.md are
made of that.

    TABLE: Final = MetricTable("edge")
    REQUESTS: Final = TABLE.counter("kvloom_edge_requests", "requests", "HTTP requests.", "route", "status")
    ...
    requests = REQUESTS.family(registry)

Each kind of process has one table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal, TypeVar

import msgspec
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvloom_common.metrics.series import CounterFamily, CounterSeries, HistogramFamily, HistogramSeries

Samples = float | Mapping[tuple[str, ...], float]
"""The value of a metric without labels, or the values by those of the labels."""
R = TypeVar("R", bound="MetricRecord")


class MetricRecord(msgspec.Struct, frozen=True):
    """A metric: its name, its unit, its meaning and its labels."""

    name: str
    """Without `_total`, with which Prometheus shows a counter."""
    unit: str
    about: str
    """A sentence."""
    labels: tuple[str, ...] = ()

    @property
    def help(self) -> str:
        """The help text that Prometheus shows."""
        return f"{self.about} Unit: {self.unit}."


class CounterRecord(MetricRecord, frozen=True):
    def family(self, registry: CollectorRegistry) -> CounterFamily:
        return CounterFamily(self.name, self.help, self.labels, registry)

    def series(self, registry: CollectorRegistry, *labels: str) -> CounterSeries:
        """Returns the only series of the metric in this process."""
        return self.family(registry).labels(*labels)

    def collected(self, samples: Samples) -> Metric:
        """Returns what a collector shows that counts elsewhere."""
        return _with_samples(CounterMetricFamily(self.name, self.help, labels=self.labels), samples)


class GaugeRecord(MetricRecord, frozen=True):
    def gauge(self, registry: CollectorRegistry) -> Gauge:
        return Gauge(self.name, self.help, self.labels, registry=registry)

    def watch(self, registry: CollectorRegistry, value: Callable[[], float]) -> None:
        """Has `value` called whenever the metric is scraped."""
        self.gauge(registry).set_function(value)

    def collected(self, samples: Samples) -> Metric:
        return _with_samples(GaugeMetricFamily(self.name, self.help, labels=self.labels), samples)


class HistogramRecord(MetricRecord, frozen=True, kw_only=True):
    buckets: tuple[float, ...]

    def family(self, registry: CollectorRegistry) -> HistogramFamily:
        return HistogramFamily(self.name, self.help, self.labels, self.buckets, registry)

    def series(self, registry: CollectorRegistry, *labels: str) -> HistogramSeries:
        return self.family(registry).labels(*labels)


class MetricTable:
    """The records of the metrics of one kind of process."""

    def __init__(
        self, role: Literal["edge", "router", "shard", "safety", "control", "orchestrator", "scaler", "epp"]
    ) -> None:
        self.role = role
        self.records: dict[str, MetricRecord] = {}

    def counter(self, name: str, unit: str, about: str, *labels: str) -> CounterRecord:
        return self._with(CounterRecord(name, unit, about, labels))

    def gauge(self, name: str, unit: str, about: str, *labels: str) -> GaugeRecord:
        return self._with(GaugeRecord(name, unit, about, labels))

    def histogram(self, name: str, unit: str, about: str, *labels: str, buckets: tuple[float, ...]) -> HistogramRecord:
        return self._with(HistogramRecord(name, unit, about, labels, buckets=buckets))

    def _with(self, record: R) -> R:
        assert record.name not in self.records
        self.records[record.name] = record
        return record


class CollectorOf(Collector):
    """Shows in a registry what `collect` returns when it is scraped."""

    def __init__(self, registry: CollectorRegistry, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        return self._collect()


M = TypeVar("M", CounterMetricFamily, GaugeMetricFamily)


def _with_samples(metric: M, samples: Samples) -> M:
    for labels, value in samples.items() if isinstance(samples, Mapping) else [((), samples)]:
        metric.add_metric(labels, value)
    return metric
