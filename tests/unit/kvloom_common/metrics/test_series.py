"""Metrics without prometheus_client's own classes must look the same to a scraper."""

from __future__ import annotations

import re
from typing import Final

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram

from kvloom_common.metrics.series import CounterFamily, HistogramFamily

BOUNDS: Final = (0.005, 0.01, 1, 2.5, 1024)
VALUES: Final = (0, 0.004, 0.005, 0.0051, 1, 1.0, 3.25, 1024, 5000.5)
_CREATED: Final = re.compile(r"(_created(?:\{.*\})?) .*")


def exposition(registry: CollectorRegistry) -> str:
    """The samples, without the creation times of the series."""
    return _CREATED.sub(r"\1", prometheus_client.generate_latest(registry).decode())


def test_counts_and_distributions_read_as_prometheus_clients_own() -> None:
    """Dashboards must not notice the difference: names, labels, buckets, sums and _created series are the same."""
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    counter = Counter("kvloom_things", "Things.", ("kind", "size"), registry=theirs)
    histogram = Histogram("kvloom_seconds", "Seconds.", ("kind",), buckets=BOUNDS, registry=theirs)
    counts = CounterFamily("kvloom_things", "Things.", ("kind", "size"), ours)
    distributions = HistogramFamily("kvloom_seconds", "Seconds.", ("kind",), BOUNDS, ours)
    assert exposition(ours) == exposition(theirs)
    for kind, size in (("a", "1"), ("b", ""), ("a", "1")):
        counter.labels(kind, size).inc(3)
        counts.labels(kind, size).total += 3
    for number, value in enumerate(VALUES):
        kind = 'quoted "' if number % 3 else "x"
        histogram.labels(kind).observe(value)
        distributions.labels(kind).observe(value)
    assert exposition(ours) == exposition(theirs)


def test_a_counter_without_labels_is_there_from_the_beginning() -> None:
    """A scraper that sees a series only after its first count cannot compute a rate."""
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    Counter("kvloom_events", "Events.", registry=theirs)
    CounterFamily("kvloom_events", "Events.", (), ours).labels()
    assert exposition(ours) == exposition(theirs)
    assert "kvloom_events_total 0.0" in exposition(ours)
