"""The metrics of the control service."""

from __future__ import annotations

from typing import Final

from prometheus_client import Counter, Gauge

FOLLOWERS: Final = Gauge(
    "kvloom_control_followers", "Edges and routers that follow the table of tenants now. Unit: streams."
)
SNAPSHOTS: Final = Counter(
    "kvloom_control_snapshots", "Whole tables that followers were sent, instead of changes. Unit: snapshots."
)
CALLS: Final = Counter(
    "kvloom_control_calls",
    "Calls of administrators, by method and the error's reason, which is empty for a success. Unit: calls.",
    ("method", "reason"),
)
