"""The metrics of `kvloom epp`."""

from __future__ import annotations

from typing import Final

from kvloom_common.metrics.series import TOKEN_SECONDS
from kvloom_common.metrics.table import MetricTable

TABLE: Final = MetricTable("epp")
ENDPOINTS_READY: Final = TABLE.gauge("kvloom_epp_endpoints_ready", "endpoints", "Engines that take requests.")
KV_GAPS: Final = TABLE.counter(
    "kvloom_epp_kv_gaps", "gaps", "Batches of KV events that were missing: replayed, or lost.", "outcome"
)
PICK_SECONDS: Final = TABLE.histogram(
    "kvloom_epp_pick_seconds",
    "seconds",
    "From the end of a request's body to the choice of its engine.",
    buckets=TOKEN_SECONDS,
)
REQUESTS: Final = TABLE.counter(
    "kvloom_epp_requests",
    "requests",
    "Requests by what became of them here: placed, served (that is, by the engine that was picked), served_elsewhere, "
    "saturated, unavailable, malformed or too_large.",
    "outcome",
)
