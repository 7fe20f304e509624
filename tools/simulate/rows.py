"""Figures of several seeds as one row: means, and how far the seeds lie apart."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

from tools.simulate.statistics import Statistics


def combine(policy: str, seeds: Sequence[Statistics]) -> dict[str, Any]:
    """`{"policy", ...means of Statistics' fields, "seeds", "spread"}`; spread = half the range over the seeds, for each
    figure; absent for one seed. Counts stay whole numbers."""
    rows = [msgspec.structs.asdict(one) for one in seeds]
    row: dict[str, Any] = {"policy": policy}
    spread: dict[str, float] = {}
    for field in rows[0]:
        values = [row[field] for row in rows if row[field] is not None]
        row[field] = _mean(values)
        if values:
            spread[field] = (max(values) - min(values)) / 2
    row["seeds"] = len(rows)
    if len(rows) > 1:
        row["spread"] = spread
    return row


def recorded_row(name: str, recorded: Statistics, *, with_capacity: bool) -> dict[str, Any]:
    """What really happened, beside what was simulated; null where there is no record."""
    row = {**combine(name, [recorded]), "router_microseconds": None, "in_force": False}
    return {**row, "capacity": None, "load_unit": "rate"} if with_capacity else row


def _mean(values: Sequence[float]) -> float | None:
    if not values:
        return None
    mean = statistics.fmean(values)
    return round(mean) if all(isinstance(value, int) for value in values) else mean
