"""The table that `kvloom simulate` prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from rich.table import Table

_Format = Callable[[float], str]


def _seconds(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def _milliseconds(value: float) -> str:
    return f"{1e3 * value:.1f}"


_COLUMNS: Final[tuple[tuple[str, str, _Format], ...]] = (
    ("hit", "hit_rate", _percent),
    ("TTFT mean s", "ttft_mean", _seconds),
    ("p50", "ttft_p50", _seconds),
    ("p90", "ttft_p90", _seconds),
    ("p99", "ttft_p99", _seconds),
    ("TPOT ms", "tpot_mean", _milliseconds),
    ("goodput", "goodput", _percent),
    ("imbalance work", "prefill_imbalance", "{:.2f}".format),
    ("in flight", "in_flight_imbalance", "{:.2f}".format),
    ("requests", "requests", "{:.0f}".format),
    ("failed", "failed", "{:.0f}".format),
    ("router µs", "router_microseconds", "{:.0f}".format),
)


def make_table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("policy", no_wrap=True)
    columns = _COLUMNS
    if any("capacity" in row for row in rows):
        columns = ((f"capacity {rows[0]['load_unit']}", "capacity", "{:.4g}".format), *_COLUMNS)
    for name, _, _ in columns:
        table.add_column(name, justify="right")
    for row in rows:
        spread = row.get("spread", {})
        cells = [_cell(row[field], spread.get(field), form) for _, field, form in columns]
        table.add_row(row["policy"], *cells)
    return table


def _cell(value: float | None, spread: float | None, form: _Format) -> str:
    if value is None:
        return "-"
    return form(value) if not spread else f"{form(value)} ±{form(spread)}"
