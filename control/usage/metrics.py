"""How far the consumer of usage records has come."""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry

from control import metric_table as table


class UsageMetrics:
    """All names begin with `kvloom_control_usage_`."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.stored = table.USAGE_RECORDS_STORED.series(registry)
        self.unreadable = table.USAGE_ENTRIES_UNREADABLE.series(registry)
        self.failures = table.USAGE_FAILURES.family(registry)
        self.waiting = table.USAGE_ENTRIES_WAITING.gauge(registry)
        self.alerts = table.BUDGET_ALERTS.family(registry)
