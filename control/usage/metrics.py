"""How far the consumer of usage records has come."""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge


class UsageMetrics:
    """All names begin with `kvloom_control_usage_`."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.stored = Counter(
            "kvloom_control_usage_records_stored",
            "Usage records that were read from the stream and stored, repeated ones included. Unit: records.",
            registry=registry,
        )
        self.unreadable = Counter(
            "kvloom_control_usage_entries_unreadable",
            "Entries of the stream of usage that this fabric has not written. Unit: entries.",
            registry=registry,
        )
        self.failures = Counter(
            "kvloom_control_usage_failures",
            "Failed attempts to read or store usage records, by what failed. Unit: attempts.",
            ("part",),
            registry=registry,
        )
        self.waiting = Gauge(
            "kvloom_control_usage_entries_waiting",
            "Entries of the stream of usage that are not stored yet. Unit: entries.",
            registry=registry,
        )
        self.alerts = Counter(
            "kvloom_control_budget_alerts",
            "Notices about budgets, by how sending them ended. Unit: notices.",
            ("outcome",),
            registry=registry,
        )
