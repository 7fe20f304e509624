"""The metrics of the control service."""

from __future__ import annotations

from typing import Final

from prometheus_client import REGISTRY

from control import metric_table as table

FOLLOWERS: Final = table.FOLLOWERS.gauge(REGISTRY)
SNAPSHOTS: Final = table.SNAPSHOTS.series(REGISTRY)
CALLS: Final = table.CALLS.family(REGISTRY)
