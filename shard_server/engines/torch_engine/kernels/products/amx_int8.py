"""Matrix products of rows with int8 weights on AMX tiles: like tile_matmul.py, but sums are exact integers.

Rows are two int8 digits each (see int8_linear.py): the sums of the first digits of 16 rows and those of their second
digits are joined and scaled before they are written out. A weight tile is 64 of the sum by 16 columns, in words of
four.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shard_server.engines.torch_engine.kernels.codegen.amx import (
    load_tile_configuration,
    tile_dot_int8,
    tile_load,
    tile_store,
    tile_zero,
)
from shard_server.engines.torch_engine.kernels.codegen.compiled import float_of_bf16, jit, prefetch
from shard_server.engines.torch_engine.kernels.products.amx_bf16 import configure, give_out
from shard_server.engines.torch_engine.kernels.products.digits import DIGIT_BASE, ROUNDING, join_digits, row_scale
from shard_server.engines.torch_engine.kernels.products.outputs import PANEL, TILE

INT8_DEPTH = 64
"""The part of the sum that one tile product takes."""
_TILE_BYTES = 1024
_CACHED_BYTES = 2**18
_SECOND = TILE * PANEL
"""The index at which the sums of second digits begin."""


@jit()
def split_row(x: Any, first: Any, second: Any) -> Any:
    """bf16 bits [columns] → int8 digits [at least columns; zeros after them], and a scale (float32):
    (first + second / 254) * scale is the row, rounded."""
    scale = row_scale(x)
    _split(x, np.float32(1) / scale, first, second)
    first[x.size :] = 0
    second[x.size :] = 0
    return scale


@jit()
def _split(x: Any, factor: Any, first: Any, second: Any) -> None:
    for column in range(x.size):
        steps = float_of_bf16(x[column]) * factor
        whole = (steps + ROUNDING) - ROUNDING
        first[column] = np.int8(np.int32(whole))
        second[column] = np.int8(np.int32(((steps - whole) * DIGIT_BASE + ROUNDING) - ROUNDING))


@jit()
def multiply_int8(
    digits: Any,
    row_scales: Any,
    depth: Any,
    weights: Any,
    column_scales: Any,
    bias: Any,
    first_panel: Any,
    end_panel: Any,
    kind: Any,
    other: Any,
    out: Any,
    scratch: Any,
) -> None:
    """Columns `first_panel` * 32 to `end_panel` * 32 of the product.

    `digits`: int8 [2 * rows * depth]. `weights`: int8, packed. `column_scales` and `bias`: float32 [columns]. `kind`,
    `other` and `out`: as for tile_matmul.multiply.
    """
    num_rows = row_scales.size
    row_size = out.size // num_rows
    configure(scratch.full, TILE, TILE)
    configure(scratch.rest, num_rows % TILE, num_rows % TILE)
    configured_rows = 0
    panel_size = depth * PANEL
    sums, finished = scratch.sums, scratch.finished
    finished_rows, finished_row, finished_panel = 0, 0, 0
    share = panel_size // ((num_rows + TILE - 1) // TILE)
    group = max(1, _CACHED_BYTES // panel_size)
    for start in range(first_panel, end_panel, group):
        end = min(start + group, end_panel)
        for row in range(0, num_rows, TILE):
            for panel in range(start, end):
                rows = min(TILE, num_rows - row)
                if num_rows > PANEL and panel + group < end_panel:
                    prefetch(weights, (panel + group) * panel_size + row // TILE * share, share)
                if rows != configured_rows:
                    load_tile_configuration(scratch.full if rows == TILE else scratch.rest)
                    configured_rows = rows
                tile_zero(0)
                tile_zero(1)
                tile_zero(2)
                tile_zero(3)
                given = 0
                rows_per_step = (finished_rows * INT8_DEPTH + depth - 1) // depth
                weight = panel * panel_size
                for k in range(row * depth, row * depth + depth, INT8_DEPTH):
                    tile_load(4, digits, k, depth)
                    tile_load(6, weights, weight, 64)
                    tile_dot_int8(0, 4, 6)
                    tile_load(7, weights, weight + _TILE_BYTES, 64)
                    tile_dot_int8(1, 4, 7)
                    tile_load(5, digits, k + num_rows * depth, depth)
                    tile_dot_int8(2, 5, 6)
                    tile_dot_int8(3, 5, 7)
                    weight += 2 * _TILE_BYTES
                    if given < finished_rows:
                        until = min(finished_rows, given + rows_per_step)
                        join_digits(
                            finished,
                            given,
                            until,
                            _SECOND,
                            row_scales,
                            finished_row,
                            column_scales,
                            bias,
                            finished_panel * PANEL,
                        )
                        give_out(finished, given, until, kind, other, out, finished_row, row_size, finished_panel)
                        given = until
                tile_store(0, sums, 0, PANEL * 4)
                tile_store(1, sums, TILE, PANEL * 4)
                tile_store(2, sums, _SECOND, PANEL * 4)
                tile_store(3, sums, _SECOND + TILE, PANEL * 4)
                sums, finished = finished, sums
                finished_rows, finished_row, finished_panel = rows, row, panel
    join_digits(
        finished, 0, finished_rows, _SECOND, row_scales, finished_row, column_scales, bias, finished_panel * PANEL
    )
    give_out(finished, 0, finished_rows, kind, other, out, finished_row, row_size, finished_panel)
