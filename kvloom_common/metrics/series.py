"""Counters and histograms for one thread: plain numbers, which are turned into Prometheus samples when it collects
them.

prometheus_client's own metrics take a lock for every update and search the buckets from the first one. For a metric
that is updated several times per request, that costs as much as reading the request's body.

Every process uses the same buckets, so that figures can be compared, and bounds its label values, each of which makes a
series in the process and in Prometheus.
"""

from __future__ import annotations

import abc
import itertools
import math
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Final, Generic, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString


class CounterSeries:
    """One series of a counter. Where every call counts, callers add to `total`."""

    __slots__ = ("created_at", "total")

    def __init__(self) -> None:
        self.created_at: Final = time.time()
        self.total = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self.total += amount


class HistogramSeries:
    """One series of a histogram."""

    __slots__ = ("_bounds", "_counts", "created_at", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.created_at: Final = time.time()
        self.total = 0.0
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        """The number of values in each bucket. The last bucket is for values above all bounds."""

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    @property
    def counts(self) -> Sequence[int]:
        """The number of values in each bucket; the last is for values above all bounds."""
        return self._counts

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts, as Prometheus wants them: (upper bound, number of values not above it)."""
        bounds = map(floatToGoString, (*self._bounds, math.inf))
        return list(zip(bounds, itertools.accumulate(map(float, self._counts)), strict=True))


S = TypeVar("S", CounterSeries, HistogramSeries)


class _Family(Collector, abc.ABC, Generic[S]):
    """One metric: a series for each set of label values."""

    def __init__(self, name: str, about: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        self._name = name
        self._about = about
        self._labels = labels
        self._series: dict[tuple[str, ...], S] = {}
        registry.register(self)

    def labels(self, *values: str) -> S:
        """The series with these label values; made on first use. Callers keep it, because looking it up costs more than
        counting."""
        series = self._series.get(values)
        if series is None:
            assert len(values) == len(self._labels)
            series = self._series[values] = self._new()
        return series

    def _all(self) -> list[tuple[tuple[str, ...], S]]:
        """A copy, because another thread may be collecting."""
        return list(self._series.items())

    @abc.abstractmethod
    def _new(self) -> S: ...


class CounterFamily(_Family[CounterSeries]):
    """Exposes the same samples as prometheus_client.Counter."""

    def _new(self) -> CounterSeries:
        return CounterSeries()

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._about, labels=self._labels)
        for values, series in self._all():
            family.add_metric(values, series.total, created=series.created_at)
        yield family


class HistogramFamily(_Family[HistogramSeries]):
    """Exposes the same samples as prometheus_client.Histogram."""

    def __init__(
        self, name: str, about: str, labels: Sequence[str], bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._bounds = [float(bound) for bound in bounds]
        super().__init__(name, about, labels, registry)

    def _new(self) -> HistogramSeries:
        return HistogramSeries(self._bounds)

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._about, labels=self._labels)
        for values, series in self._all():
            family.add_metric(values, series.buckets, series.total)
            labels = dict(zip(self._labels, values, strict=True))
            family.samples.append(Sample(f"{self._name}_created", labels, series.created_at))
        yield family


LATENCY_SECONDS: Final = (
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
)
"""For requests, and for parts of them."""
TOKEN_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
"""For the time between tokens."""
TOKENS: Final = (1, 4, 16, 64, 256, 1024, 4096, 16_384, 65_536, 262_144)
"""For the lengths of prompts and answers."""
FEW_TOKENS: Final = (0, 1, 2, 3, 4, 8, 16, 32, 64)


OTHER: Final = "other"
"""Stands for all values that have no series of their own."""
MAX_LABEL_VALUES: Final = 256


class LabelValues:
    """The values of one label that have a series of their own: the first that come. Later ones share `OTHER`."""

    def __init__(self, max_values: int = MAX_LABEL_VALUES) -> None:
        self._max_values = max_values
        self._values: set[str] = set()

    def fold(self, value: str) -> str:
        """The label value to count under."""
        if value not in self._values:
            if len(self._values) >= self._max_values:
                return OTHER
            self._values.add(value)
        return value
