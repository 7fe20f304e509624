"""How current the table of tenants of a process is."""

from __future__ import annotations

from typing import NamedTuple

from prometheus_client import CollectorRegistry

from kvloom_common.access.tenants import Tenants
from kvloom_common.metrics.table import GaugeRecord, MetricTable


class TenantTableRecords(NamedTuple):
    """The metrics of a process that has a table of tenants."""

    age: GaugeRecord
    connected: GaugeRecord
    keys: GaugeRecord
    version: GaugeRecord

    @classmethod
    def of(cls, table: MetricTable) -> TenantTableRecords:
        """Adds them to the table of an edge or router."""
        name, follows = f"kvloom_{table.role}_tenant_table", "the table of tenants"
        return cls(
            table.gauge(f"{name}_age_seconds", "seconds", f"How long {follows} has not followed that of control."),
            table.gauge(f"{name}_connected", "1 for yes, 0 for no", f"Whether {follows} follows that of control."),
            table.gauge(f"{name}_keys", "keys", f"Keys in {follows}."),
            table.gauge(f"{name}_version", "versions", f"The version of {follows}."),
        )

    def observe(self, tenants: Tenants, registry: CollectorRegistry) -> None:
        self.age.watch(registry, lambda: tenants.age_seconds)
        self.connected.watch(registry, lambda: float(tenants.connected))
        self.keys.watch(registry, lambda: tenants.table.num_keys)
        self.version.watch(registry, lambda: tenants.table.version)
