"""The order in which cells are asked for a request: the one first where it begins soonest, but the own one unless
another is better by a margin.

A request begins in a cell after the way there and back, the wait there, and the prefill of what another cell has
cached. The last of these keeps a conversation where it is: it changes sides when the conversation moves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

MARGIN_SECONDS: Final = 0.05
"""By how much another cell must be better than the own one. What is known of cells is estimated, and up to a second
old."""
MARGIN_SHARE: Final = 0.2
"""The same, as a share of the time that the better cell needs."""


class CellView(NamedTuple):
    """A cell as it is for one request."""

    name: str
    round_trip_seconds: float
    wait_seconds: float
    """Infinity: it has no shard for the request."""
    prefill_tokens_per_second: float
    """0: not known."""


class CachedPrefix(NamedTuple):
    """The part of a prompt that a cell has cached, as far as is known."""

    cell: str
    num_tokens: int


def start_seconds(cell: CellView, cached: CachedPrefix | None) -> float:
    """How soon the request would begin there; what every cell has to compute is left out."""
    seconds = cell.round_trip_seconds + cell.wait_seconds
    if cached is not None and cached.cell != cell.name and cell.prefill_tokens_per_second > 0.0:
        seconds += cached.num_tokens / cell.prefill_tokens_per_second
    return seconds


def ordered_cells(cells: Sequence[CellView], cached: CachedPrefix | None) -> list[str]:
    """The names of the cells, the best first. The first of `cells` is the own one."""
    seconds = {cell.name: start_seconds(cell, cached) for cell in cells}
    order = sorted(seconds, key=seconds.__getitem__)
    if not order:
        return order
    own, best = cells[0].name, seconds[order[0]]
    if best == math.inf or seconds[own] <= best + max(MARGIN_SECONDS, MARGIN_SHARE * best):
        order.remove(own)
        order.insert(0, own)
    return order
