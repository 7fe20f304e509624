"""Rows as two int8 digits a number, for int8 weights: (first + second / 254) * scale is the row, rounded to 15 bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from shard_server.engines.torch_engine.kernels.codegen.compiled import float_of_bf16, jit
from shard_server.engines.torch_engine.kernels.codegen.vector_ops import joined_digits
from shard_server.engines.torch_engine.kernels.products.outputs import PANEL, TILE

DIGIT_BASE = np.float32(254)
"""One step of the first digit equals this many steps of the second."""
ROUNDING = np.float32(12582912)
"""1.5 * 2**23: adding and subtracting it rounds to the nearest integer, ties to even."""
_LIMIT = np.float32(127)
_SMALLEST = np.float32(1e-12)
"""Replaces the largest value of a row that is all zeros."""


@jit()
def row_scale(x: Any) -> Any:
    """The scale of a row of bf16 bits."""
    return max(_largest(x), _SMALLEST) / _LIMIT


@jit()
def _largest(x: Any) -> Any:
    """The largest magnitude. Without the sign, bf16 numbers are in the order of their bits."""
    most = np.uint16(0)
    for column in range(x.size):
        most = max(most, np.uint16(x[column] & np.uint16(0x7FFF)))
    return float_of_bf16(most)


@jit(inline=True)
def split_number(bits: Any, factor: Any) -> Any:
    """The two digits (int32) of a bf16 number, whose row's scale is 1 / factor."""
    steps = float_of_bf16(bits) * factor
    whole = (steps + ROUNDING) - ROUNDING
    return np.int32(whole), np.int32(((steps - whole) * DIGIT_BASE + ROUNDING) - ROUNDING)


@jit()
def join_digits(
    sums: Any,
    first: Any,
    end: Any,
    second: Any,
    row_scales: Any,
    first_row: Any,
    column_scales: Any,
    bias: Any,
    first_column: Any,
) -> None:
    """Replace the sums of first digits (int32 [rows, PANEL]), rows `first` to `end`, by the product in float32.
    Those of second digits begin `second` numbers further on; the scale of sums' row 0 is row_scales[first_row]."""
    for row in range(first, end):
        scale = row_scales[first_row + row]
        for half in range(0, PANEL, TILE):
            place, column = row * PANEL + half, first_column + half
            joined_digits(sums, place, second + place, DIGIT_BASE, scale, column_scales, bias, column)
