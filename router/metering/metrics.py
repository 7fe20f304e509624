"""How far usage records have come. Updated once per batch."""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge


class MeteringMetrics:
    """All names begin with `kvloom_router_usage_`."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.records = Counter(
            "kvloom_router_usage_records",
            "Usage records that were made for requests that ended. Unit: records.",
            registry=registry,
        )
        self.dropped = Counter(
            "kvloom_router_usage_records_dropped",
            "Usage records that are lost, because neither the disk nor memory had room. Unit: records.",
            registry=registry,
        )
        self.unwritten = Gauge(
            "kvloom_router_usage_records_unwritten",
            "Usage records that are only in memory now, because the spool cannot be written. Unit: records.",
            registry=registry,
        )
        self.spool_bytes = Gauge(
            "kvloom_router_usage_spool_bytes",
            "Size of the spool of usage records that the control service does not have yet. Unit: bytes.",
            registry=registry,
        )
        self.unstored = Gauge(
            "kvloom_router_usage_records_unstored",
            "Usage records of this router that the control service does not have yet. Unit: records.",
            registry=registry,
        )
