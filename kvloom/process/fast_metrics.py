"""Counters and histograms that one thread counts: plain numbers, of which Prometheus is told when it asks.

prometheus_client's own take a lock for every number and look each bucket up from the first; for what is counted several
times a request that costs as much as reading the request's body does.
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


class Count:
    """One series of a counter. Add to `total`."""

    __slots__ = ("created_at", "total")

    def __init__(self) -> None:
        self.created_at: Final = time.time()
        self.total = 0.0


class Distribution:
    """One series of a histogram."""

    __slots__ = ("_bounds", "_counts", "created_at", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.created_at: Final = time.time()
        self.total = 0.0
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        """By bucket; the last is for what is above all bounds."""

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, how many values are not above it)."""
        bounds = map(floatToGoString, (*self._bounds, math.inf))
        return list(zip(bounds, itertools.accumulate(map(float, self._counts)), strict=True))


S = TypeVar("S", Count, Distribution)


class _Family(Collector, abc.ABC, Generic[S]):
    """One metric: a series for each set of label values."""

    def __init__(self, name: str, about: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        self._name = name
        self._about = about
        self._labels = labels
        self._series: dict[tuple[str, ...], S] = {}
        registry.register(self)

    def labels(self, *values: str) -> S:
        """The series with these values, made when it is first asked for. Keep it: looking it up costs more than
        counting."""
        series = self._series.get(values)
        if series is None:
            assert len(values) == len(self._labels)
            series = self._series[values] = self._new()
        return series

    def _all(self) -> list[tuple[tuple[str, ...], S]]:
        """A copy: whoever collects may be another thread."""
        return list(self._series.items())

    @abc.abstractmethod
    def _new(self) -> S: ...


class CountFamily(_Family[Count]):
    """As prometheus_client.Counter."""

    def _new(self) -> Count:
        return Count()

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._about, labels=self._labels)
        for values, series in self._all():
            family.add_metric(values, series.total, created=series.created_at)
        yield family


class DistributionFamily(_Family[Distribution]):
    """As prometheus_client.Histogram."""

    def __init__(
        self, name: str, about: str, labels: Sequence[str], bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._bounds = [float(bound) for bound in bounds]
        super().__init__(name, about, labels, registry)

    def _new(self) -> Distribution:
        return Distribution(self._bounds)

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._about, labels=self._labels)
        for values, series in self._all():
            family.add_metric(values, series.buckets, series.total)
            labels = dict(zip(self._labels, values, strict=True))
            family.samples.append(Sample(f"{self._name}_created", labels, series.created_at))
        yield family
