"""Writes the tables of docs/reference/metrics.md, which derive from the tables of the processes' metrics.

It is called as `python -m tests.metrics_page`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import control.metric_table
import edge_http.metric_table
import orchestrator.metrics
import router.metric_table
import safety_svc.metrics
import shard_server.metric_table
import tools.gateway.metrics
import tools.scaler.metrics
from kvloom_common.metrics.table import CounterRecord, GaugeRecord, MetricRecord, MetricTable

PAGE: Final = Path(__file__).parents[1] / "docs" / "reference" / "metrics.md"
MODULES: Final = (
    edge_http.metric_table,
    router.metric_table,
    shard_server.metric_table,
    safety_svc.metrics,
    control.metric_table,
    orchestrator.metrics,
    tools.scaler.metrics,
    tools.gateway.metrics,
)
TABLES: Final[Sequence[MetricTable]] = [module.TABLE for module in MODULES]


def kind_of(record: MetricRecord) -> str:
    return {CounterRecord: "counter", GaugeRecord: "gauge"}.get(type(record), "histogram")


def shown_name(record: MetricRecord) -> str:
    """How queries name it."""
    return f"{record.name}_total" if isinstance(record, CounterRecord) else record.name


def page_with_tables(page: str) -> str:
    for table in TABLES:
        begin, end = f"<!-- metrics of: {table.role} -->\n", "<!-- end -->"
        head, found, rest = page.partition(begin)
        assert found, f"docs/reference/metrics.md has no {begin}"
        page = f"{head}{begin}{_rows(table)}\n\n{end}{rest.partition(end)[2]}"
    return page


def _rows(table: MetricTable) -> str:
    rows = ["| metric | type | labels | what it counts |", "|---|---|---|---|"]
    for record in sorted(table.records.values(), key=shown_name):
        labels = ", ".join(f"`{label}`" for label in sorted(record.labels)) or "–"
        rows.append(f"| `{shown_name(record)}` | {kind_of(record)} | {labels} | {record.help} |")
    return "\n".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(PAGE.read_text()))
