"""Matrix products by AVX-512's dot products: of pairs of bf16 (BF16), and of four 8-bit integers (VNNI).

They take two and four numbers of a row at a time, as words; otherwise they work as in vectors.py. int8 weights are
multiplied with rows of two int8 digits each (see int8_linear.py), of which the processor wants unsigned ones: 128 is
added to each, and 128 times the sum of a column's weights is subtracted from its sums. These are exact integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shard_server.engines.torch_engine.kernels.codegen.compiled import jit
from shard_server.engines.torch_engine.kernels.codegen.vector_blocks import Int8Dots, Registers
from shard_server.engines.torch_engine.kernels.products.digits import join_digits, row_scale, split_number
from shard_server.engines.torch_engine.kernels.products.outputs import PANEL, make_give_out
from shard_server.engines.torch_engine.kernels.products.vectors import (
    BF16_TILE_BYTES,
    CACHED_BYTES,
    block_of,
    block_rows,
    make_multiply_block,
)

OFFSET = 128


@jit()
def pair_row(x: Any, row: Any, num_rows: Any, max_rows: Any, num_words: Any, blocks: Any) -> None:
    """Words of two bf16 [columns / 2] → row `row` of the blocks of `num_rows` rows; zeros follow up to `num_words`."""
    first, step = block_of(row, num_rows, max_rows)
    own = blocks[first * num_words + row - first : (first + step) * num_words]
    for word in range(x.size):
        own[word * step] = x[word]
    for word in range(x.size, num_words):
        own[word * step] = np.uint32(0)


@jit()
def split_row(x: Any, row: Any, num_rows: Any, max_rows: Any, num_words: Any, blocks: Any) -> Any:
    """bf16 bits [columns] → words of four digits, as row `row` of the blocks of `num_rows` rows: all first digits of a
    block's rows, then all second ones, each plus OFFSET. Digits of 0 follow up to `num_words`. Returns the scale:
    (first + second / 254) * scale is the row, rounded."""
    scale = row_scale(x)
    factor = np.float32(1) / scale
    start, step = block_of(row, num_rows, max_rows)
    own = blocks[2 * start * num_words : 2 * (start + step) * num_words]
    for word in range(num_words):
        firsts, seconds = np.uint32(0), np.uint32(0)
        for place in range(4):
            column = 4 * word + place
            first, second = split_number(x[column], factor) if column < x.size else (np.int32(0), np.int32(0))
            shift = np.uint32(8 * place)
            firsts |= np.uint32(first + OFFSET) << shift
            seconds |= np.uint32(second + OFFSET) << shift
        own[word * 2 * step + row - start] = firsts
        own[word * 2 * step + step + row - start] = seconds
    return scale


def make_multiply_int8(registers: Registers) -> Any:
    """`multiply_int8` for one kind of registers."""
    max_rows, give_out = registers.max_rows // 2, make_give_out(native=False)
    multiply_block = make_multiply_block(Int8Dots(), BF16_TILE_BYTES, registers, 2 * max_rows)

    @jit(variant=registers)
    def multiply_int8(
        blocks: Any,
        row_scales: Any,
        depth: Any,
        weights: Any,
        corrections: Any,
        column_scales: Any,
        bias: Any,
        first_panel: Any,
        end_panel: Any,
        kind: Any,
        other: Any,
        out: Any,
        sums: Any,
    ) -> None:
        """Columns `first_panel` * 32 to `end_panel` * 32 of the product.

        `blocks`: words of `split_row`. `weights`: int8, packed. `corrections`: int32 [columns]: -OFFSET times the sum
        of a column. `column_scales`, `bias`: float32 [columns]. `kind`, `other`, `out`, `sums`: see vectors.multiply.
        """
        num_rows = row_scales.size
        row_size, step = out.size // num_rows, block_rows(num_rows, max_rows)
        panel_size, num_words = depth * PANEL, depth // 4
        group = max(1, CACHED_BYTES // panel_size)
        for start in range(first_panel, end_panel, group):
            for row in range(0, num_rows, step):
                rows = min(step, num_rows - row)
                block = 2 * row * num_words
                for panel in range(start, min(start + group, end_panel)):
                    column = panel * PANEL
                    multiply_block(
                        2 * rows, blocks, block, weights, panel * panel_size, depth // 64, corrections, column, sums
                    )
                    join_digits(sums, 0, rows, rows * PANEL, row_scales, row, column_scales, bias, column)
                    give_out(sums, 0, rows, kind, other, out, row, row_size, panel)

    return multiply_int8
