"""The table that `kvloom simulate` prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table

_Format = Callable[[float], str]
_Column = tuple[str, str, _Format]
"""Heading, field and format."""


def _seconds(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def _milliseconds(value: float) -> str:
    return f"{1e3 * value:.1f}"


_COLUMNS: Final[tuple[_Column, ...]] = (
    ("hit", "hit_rate", _percent),
    ("TTFT s", "ttft_mean", _seconds),
    ("/ pool", "ttft_of_pool", "{:.2f}".format),
    ("p50", "ttft_p50", _seconds),
    ("p90", "ttft_p90", _seconds),
    ("p99", "ttft_p99", _seconds),
    ("TPOT ms", "tpot_mean", _milliseconds),
    ("goodput", "goodput", _percent),
    ("good/s", "goodput_per_second", "{:.2f}".format),
    ("tokens/s", "output_tokens_per_second", "{:.0f}".format),
    ("work max/mean", "prefill_imbalance", "{:.2f}".format),
    ("in flight max/mean", "in_flight_imbalance", "{:.2f}".format),
    ("requests", "requests", "{:.0f}".format),
    ("failed", "failed", "{:.0f}".format),
    ("waited beside idle", "waited_beside_idle", "{:.0f}".format),
    ("router µs", "router_microseconds", "{:.0f}".format),
)


_OPTIONAL_COLUMNS: Final = (
    "router_microseconds",
    "prefill_imbalance",
    "in_flight_imbalance",
    "requests",
    "ttft_p50",
    "ttft_p90",
)
"""Columns that are left out, in this order, if the terminal is too narrow. --json has all of them."""
_FAULT_COLUMNS: Final = ("failed", "waited_beside_idle")
"""Columns that are shown only if there is something in them."""
_CLASS_COLUMNS: Final = ("goodput_per_second", "output_tokens_per_second")
"""Columns that are shown with the figures of classes only."""
_UNLIMITED_WIDTH: Final = 10_000


def print_table(rows: Sequence[dict[str, Any]], title: str, console: Console) -> None:
    columns: list[_Column] = [
        column
        for column in _COLUMNS
        if (column[1] not in _FAULT_COLUMNS or any(row[column[1]] for row in rows))
        and (column[1] not in _CLASS_COLUMNS or any("classes" in row for row in rows))
    ]
    if any("capacity" in row for row in rows):
        columns.insert(0, (f"capacity {rows[0]['load_unit']}", "capacity", "{:.4g}".format))
    table = _make_table(rows, title, columns)
    for field in _OPTIONAL_COLUMNS:
        if console.measure(table, options=console.options.update(max_width=_UNLIMITED_WIDTH)).maximum <= console.width:
            break
        columns = [column for column in columns if column[1] != field]
        table = _make_table(rows, title, columns)
    console.print(table)


def _make_table(rows: Sequence[dict[str, Any]], title: str, columns: Sequence[_Column]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("policy", no_wrap=True)
    for name, _, _ in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(f"{row['policy']} (in force)" if row.get("in_force") else row["policy"], *_cells(row, columns))
        for name, of_part in {**row.get("models", {}), **row.get("classes", {})}.items():
            table.add_row(f"  {name}", *_cells(of_part, columns))
    return table


def _cells(row: dict[str, Any], columns: Sequence[_Column]) -> list[str]:
    """The capacity of a fleet is not that of one of its models."""
    spread = row.get("spread", {})
    return [_cell(row.get(field), spread.get(field), form) for _, field, form in columns]


def _cell(value: float | None, spread: float | None, form: _Format) -> str:
    if value is None:
        return "-"
    return form(value) if not spread else f"{form(value)} ±{form(spread)}"


def print_calibration(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Print how well predictions came true: of a single policy all terms, of several the TTFT. Nothing where nothing
    was predicted."""
    of_policies = [(row["policy"], row["calibration"]) for row in rows if row.get("calibration")]
    if not of_policies:
        return
    table = Table(title="predictions against what happened", title_justify="left", box=None, pad_edge=False)
    table.add_column("policy", no_wrap=True)
    for name in ("term", "mean error s", "|error| p50", "p90", "within 25%", "predictions"):
        table.add_column(name, justify="right", no_wrap=True)
    for policy, terms in of_policies:
        for term, one in terms.items():
            if term != "ttft" and len(of_policies) > 1:
                continue
            table.add_row(
                policy,
                term,
                f"{one['mean_error']:+.3f}",
                _seconds(one["p50_absolute_error"]),
                _seconds(one["p90_absolute_error"]),
                _percent(one["share_within_25_percent"]),
                str(one["num_predictions"]),
            )
    console.print()
    console.print(table)
