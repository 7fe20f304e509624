"""Metrics of an edge's links to several routers."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvloom.router_link.group import RouterGroup


class RouterGroupCollector(Collector):
    def __init__(self, group: RouterGroup) -> None:
        self._group = group

    def collect(self) -> Iterable[Metric]:
        group = self._group
        yield CounterMetricFamily(
            "kvloom_edge_reattached_requests",
            "Requests that lost their router and were taken over by another. Unit: requests.",
            group.num_reattached,
        )
        yield CounterMetricFamily(
            "kvloom_edge_orphaned_requests",
            "Requests that lost their router and found no other. Unit: requests.",
            group.num_given_up,
        )
        yield GaugeMetricFamily(
            "kvloom_edge_parked_requests",
            "Requests that have lost their router and look for another now. Unit: requests.",
            group.num_parked,
        )
