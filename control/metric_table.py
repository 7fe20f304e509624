"""The metrics of the control service."""

from __future__ import annotations

from typing import Final

from kvloom_common.metrics.table import MetricTable

# A row has two lines, of which the formatter makes six.
# fmt: off
TABLE: Final = MetricTable("control")
BUDGET_ALERTS: Final = TABLE.counter(
    "kvloom_control_budget_alerts", "notices", "Notices about budgets, by how sending them ended.", "outcome")
CALLS: Final = TABLE.counter(
    "kvloom_control_calls", "calls", "Calls of administrators, by method and the error's reason, which is empty for a "
    "success.", "method", "reason")
FOLLOWERS: Final = TABLE.gauge(
    "kvloom_control_followers", "streams", "Edges and routers that follow the table of tenants now.")
SNAPSHOTS: Final = TABLE.counter(
    "kvloom_control_snapshots", "snapshots", "Whole tables that followers were sent, instead of changes.")
USAGE_COST: Final = TABLE.gauge(
    "kvloom_control_usage_cost", "the currency of prices", "Cost of the usage of this month (UTC), by tenant; those "
    "that spent least are counted together as other.", "tenant")
USAGE_ENTRIES_UNREADABLE: Final = TABLE.counter(
    "kvloom_control_usage_entries_unreadable", "entries", "Entries of the stream of usage that this fabric has not "
    "written.")
USAGE_ENTRIES_WAITING: Final = TABLE.gauge(
    "kvloom_control_usage_entries_waiting", "entries", "Entries of the stream of usage that are not stored yet.")
USAGE_FAILURES: Final = TABLE.counter(
    "kvloom_control_usage_failures", "attempts", "Failed attempts to read or store usage records, by what failed.",
    "part")
USAGE_RECORDS_STORED: Final = TABLE.counter(
    "kvloom_control_usage_records_stored", "records", "Usage records that were read from the stream and stored, "
    "repeated ones included.")
