"""Matrix products of bf16 rows with packed weights on AMX tiles, fused with the operation that follows.

Weights are stored in the order in which they are read: for every panel of 32 columns, for every 32 of the sum (K), two
tiles of 16 columns. So a decode step reads memory once from front to back. A panel stays in the cache for all rows, of
which 32 make up a block of two by two tiles.

Sums run in the order of K in float32, whatever the number of rows, the position of a row, or the panels of a thread: a
row's bits depend on that row alone (ADR 5). The last block's tiles have as many rows as are left.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from shard_server.engines.torch_engine.kernels.codegen.amx import (
    load_tile_configuration,
    tile_dot,
    tile_load,
    tile_store,
)
from shard_server.engines.torch_engine.kernels.codegen.compiled import jit, prefetch
from shard_server.engines.torch_engine.kernels.products.outputs import PANEL, TILE, make_give_out

DEPTH = 32
"""The part of K that one tile product sums over."""
_TILE_NUMBERS = 512
_CACHED_NUMBERS = 2**17
"""The number of weights that are multiplied with all rows before the next ones: they stay in the L2 cache."""
give_out = make_give_out(native=True)

_Array = np.ndarray[Any, Any]


class ProductScratch(NamedTuple):
    """The working memory of one thread."""

    sums: _Array
    """float32 [32 * 32]"""
    finished: _Array
    """The sums of the previous block."""
    full: _Array
    """The tile configuration of a block of 32 rows."""
    rest: _Array
    """The tile configuration of the last block."""


@jit()
def configure(configuration: Any, first: Any, others: Any) -> None:
    """Set registers 0, 1 and 4 to `first` rows, and 2, 3 and 5 to `others` rows."""
    for register in range(6):
        rows = others if register in (2, 3, 5) else first
        configuration[48 + register] = rows
        configuration[16 + 2 * register] = 64 if rows else 0


@jit()
def multiply(
    x: Any,
    depth: Any,
    weights: Any,
    bias: Any,
    first_panel: Any,
    end_panel: Any,
    kind: Any,
    other: Any,
    out: Any,
    scratch: Any,
) -> None:
    """Columns `first_panel` * 32 to `end_panel` * 32 of the product.

    `x`: bf16 bits [rows * depth]. `weights`: bf16 bits, packed (see above). `bias`: float32 [columns]. `other` and
    `out`: bf16 bits [rows * columns], or what `kind` says: see ROUNDED.
    """
    num_rows = x.size // depth
    row_size = out.size // num_rows
    configure(scratch.full, TILE, TILE)
    configure(scratch.rest, min(num_rows % PANEL, TILE), max(num_rows % PANEL - TILE, 0))
    configured_rows = 0
    panel_size = depth * PANEL
    # The sums of a block are written out while the next block is multiplied.
    sums, finished = scratch.sums, scratch.finished
    finished_rows, finished_row, finished_panel = 0, 0, 0
    share = panel_size // ((num_rows + PANEL - 1) // PANEL)
    group = max(1, _CACHED_NUMBERS // panel_size)
    for start in range(first_panel, end_panel, group):
        end = min(start + group, end_panel)
        for row in range(0, num_rows, PANEL):
            for panel in range(start, end):
                rows = min(PANEL, num_rows - row)
                if num_rows > PANEL and panel + group < end_panel:
                    prefetch(weights, (panel + group) * panel_size + row // PANEL * share, share * 2)
                # Not for every panel of a short batch, because loading a configuration makes the tiles wait.
                if rows != configured_rows:
                    load_tile_configuration(scratch.full if rows == PANEL else scratch.rest)
                    configured_rows = rows
                tile_load(0, bias, panel * PANEL, 0)  # the same row for all: a stride of 0
                tile_load(1, bias, panel * PANEL + TILE, 0)
                if rows > TILE:
                    tile_load(2, bias, panel * PANEL, 0)
                    tile_load(3, bias, panel * PANEL + TILE, 0)
                given = 0
                rows_per_step = (finished_rows * DEPTH + depth - 1) // depth
                weight = panel * panel_size
                for k in range(row * depth, row * depth + depth, DEPTH):
                    tile_load(4, x, k, depth * 2)
                    tile_load(6, weights, weight, 64)
                    tile_dot(0, 4, 6)
                    tile_load(7, weights, weight + _TILE_NUMBERS, 64)
                    tile_dot(1, 4, 7)
                    if rows > TILE:
                        tile_load(5, x, k + TILE * depth, depth * 2)
                        tile_dot(2, 5, 6)
                        tile_dot(3, 5, 7)
                    weight += 2 * _TILE_NUMBERS
                    if given < finished_rows:
                        until = min(finished_rows, given + rows_per_step)
                        give_out(finished, given, until, kind, other, out, finished_row, row_size, finished_panel)
                        given = until
                tile_store(0, sums, 0, PANEL * 4)
                tile_store(1, sums, TILE, PANEL * 4)
                if rows > TILE:
                    tile_store(2, sums, TILE * PANEL, PANEL * 4)
                    tile_store(3, sums, TILE * PANEL + TILE, PANEL * 4)
                sums, finished = finished, sums
                finished_rows, finished_row, finished_panel = rows, row, panel
    give_out(finished, 0, finished_rows, kind, other, out, finished_row, row_size, finished_panel)
