"""How far usage records have come. Updated once per batch."""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry

from router import metric_table as table


class MeteringMetrics:
    """All names begin with `kvloom_router_usage_`."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.records = table.USAGE_RECORDS.series(registry)
        self.dropped = table.USAGE_RECORDS_DROPPED.series(registry)
        self.unwritten = table.USAGE_RECORDS_UNWRITTEN.gauge(registry)
        self.spool_bytes = table.USAGE_SPOOL_BYTES.gauge(registry)
        self.unstored = table.USAGE_RECORDS_UNSTORED.gauge(registry)
