"""How current the table of tenants of a process is."""

from __future__ import annotations

from typing import Literal

from prometheus_client import CollectorRegistry, Gauge

from kvloom_common.access.tenants import Tenants


def observe(tenants: Tenants, registry: CollectorRegistry, role: Literal["edge", "router"]) -> None:
    """Add the gauges of a process of that role to a registry of metrics."""
    for name, about, value in (
        (
            "age_seconds",
            "How long the table of tenants has not followed that of control. Unit: seconds.",
            lambda: tenants.age_seconds,
        ),
        (
            "connected",
            "Whether the table of tenants follows that of control. Unit: 1 for yes, 0 for no.",
            lambda: float(tenants.connected),
        ),
        ("keys", "Keys in the table of tenants. Unit: keys.", lambda: tenants.table.num_keys),
        ("version", "The version of the table of tenants. Unit: versions.", lambda: tenants.table.version),
    ):
        Gauge(f"kvloom_{role}_tenant_table_{name}", about, registry=registry).set_function(value)
