"""Usage as a table, CSV or JSON. Pure."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any, Final

from rich.table import Table

from kvloom.v1 import usage_service_pb2 as pb
from kvloom_common.tenancy.prices import decimal

GROUPS: Final = {
    "day": (pb.USAGE_GROUP_DAY, "day"),
    "model": (pb.USAGE_GROUP_MODEL, "model"),
    "key": (pb.USAGE_GROUP_KEY, "key_id"),
    "tenant": (pb.USAGE_GROUP_TENANT, "tenant"),
    "tier": (pb.USAGE_GROUP_TIER, "tier"),
    "class": (pb.USAGE_GROUP_CLASS, "priority_class"),
}
"""By name: (what the service calls it, its field in a row)."""
SUMS: Final = (
    "num_requests",
    "num_prompt_tokens",
    "num_cached_tokens",
    "num_output_tokens",
    "num_reasoning_tokens",
)


def rows_of(found: Sequence[pb.UsageRow], groups: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {
            **{group: getattr(row, GROUPS[group][1]) for group in groups},
            **{name: getattr(row, name) for name in SUMS},
            "block_seconds": round(row.block_seconds, 3),
            "cost": decimal(row.cost_nanos),
        }
        for row in found
    ]


def as_csv(rows: Sequence[dict[str, Any]], groups: Sequence[str]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, [*groups, *SUMS, "block_seconds", "cost"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_table(rows: Sequence[dict[str, Any]], groups: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False)
    for group in groups:
        table.add_column(group, overflow="fold")
    for name in ("requests", "prompt", "cached", "output", "cost"):
        table.add_column(name, justify="right")
    for row in rows:
        sums = (f"{row[name]:,}" for name in SUMS[:4])
        table.add_row(*(str(row[group]) for group in groups), *sums, row["cost"])
    return table
