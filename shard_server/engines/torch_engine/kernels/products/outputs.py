"""Says what becomes of a product's sums: they are rounded, added, gated or kept, as the task's kind says."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from shard_server.engines.torch_engine.kernels.codegen.compiled import jit
from shard_server.engines.torch_engine.kernels.codegen.vector_ops import copied, rounding_ops

TILE = 16
PANEL = 32
"""The number of columns that are multiplied at a time: two tiles."""
SCRATCH_FLOATS = PANEL * PANEL + PANEL
"""The size of a thread's scratch memory for products in vector registers: sums of a block, and zeros."""
ROUNDED, ADDED, GATED, FLOATS, GELU = range(5)
"""The output: bf16; bf16 with `other` added; silu(gate) * up, with columns of both alternating 16 by 16; float32;
bf16 of GELU, which encoders have."""


class ProductTasks(NamedTuple):
    """The compiled tasks of one family's products: (task, part, num_parts)."""

    prepare_rows: Any
    """Prepares the rows of bf16 products, or of all."""
    split_rows: Any
    """Splits the rows of int8 products, if they take digits."""
    multiply_columns: Any
    multiply_int8_columns: Any
    group_rows: Any
    """Prepares the rows of products with grouped weights."""
    multiply_group_columns: Any


@jit()
def no_task(_task: Any, _part: Any, _num_parts: Any) -> None:
    """Does nothing, where a family needs no such task."""


@functools.cache
def make_give_out(*, native: bool) -> Any:
    """`give_out` for one kind of CPU; see vector_ops.rounding_ops."""
    ops = rounding_ops(native=native)
    rounded, rounded_sum, rounded_gated, rounded_gelu = (
        ops.rounded,
        ops.rounded_sum,
        ops.rounded_gated,
        ops.rounded_gelu,
    )

    @jit(variant="native" if native else "portable")
    def give_out(
        sums: Any, first: Any, end: Any, kind: Any, other: Any, out: Any, first_row: Any, row_size: Any, panel: Any
    ) -> None:
        """Write the rows `first` to `end` of `sums` (float32 [rows, PANEL]) as rows from `first_row` on."""
        for row in range(first, end):
            source = row * PANEL
            target = (first_row + row) * row_size
            if kind == GATED:
                rounded_gated(sums, source, source + TILE, out, target + panel * TILE)
                continue
            target += panel * PANEL
            if kind == ADDED:
                rounded_sum(sums, source, other, out, target)
                rounded_sum(sums, source + TILE, other, out, target + TILE)
            elif kind == ROUNDED:
                rounded(sums, source, out, target)
                rounded(sums, source + TILE, out, target + TILE)
            elif kind == GELU:
                rounded_gelu(sums, source, out, target)
                rounded_gelu(sums, source + TILE, out, target + TILE)
            else:
                target += panel * PANEL
                copied(sums, source, out, target)
                copied(sums, source + TILE, out, target + 2 * TILE)

    return give_out


@jit(inline=True)
def operands(task: Any) -> Any:
    """The arguments that all products have; see amx_tasks.multiply_columns."""
    return task[3], task[4], task[5], task[6], task[7], task[8], task[9], task[10]


@jit(inline=True)
def out_size(num_rows: Any, num_columns: Any, kind: Any) -> Any:
    """The size of `out` in bf16 numbers"""
    if kind == GATED:
        return num_rows * num_columns // 2
    return num_rows * num_columns * 2 if kind == FLOATS else num_rows * num_columns
