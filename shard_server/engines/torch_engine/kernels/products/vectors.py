"""Matrix products in vector registers, in float32: rows of float32 times weights of bf16 or int8.

A panel of 32 columns stays in the cache for all rows, of which as many as the registers have room for make up a block;
a block's rows lie interleaved, so that one pointer reaches them all. Sums run in the order of K whatever the number of
rows, the position of a row, or the panels of a thread: a row's bits depend on that row alone (ADR 5).
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from shard_server.engines.torch_engine.kernels.codegen.compiled import float_of_bf16, jit
from shard_server.engines.torch_engine.kernels.codegen.llvm import (
    address,
    integer,
    intrinsic,
    load_vector,
    multiply_add,
    store_vector,
)
from shard_server.engines.torch_engine.kernels.codegen.vector_blocks import (
    Bf16Dots,
    Bf16Pairs,
    Int8Bytes,
    Registers,
    Rows,
    Weights,
    emit_block,
    nth_tile,
    switch_rows,
)
from shard_server.engines.torch_engine.kernels.products.outputs import PANEL, TILE, make_give_out

BF16_TILE_BYTES, _INT8_TILE_BYTES = 2048, 512
"""The bytes of a tile for all columns of a panel."""
CACHED_BYTES = 2**18
"""The weights that are multiplied with all rows before the next ones: they stay in the L2 cache."""
_FLOAT = ir.FloatType()


@jit(inline=True)
def block_rows(num_rows: Any, max_rows: Any) -> Any:
    """The number of rows in a block, of which the last may have fewer."""
    num_blocks = (num_rows + max_rows - 1) // max_rows
    return (num_rows + num_blocks - 1) // num_blocks


@jit(inline=True)
def block_of(row: Any, num_rows: Any, max_rows: Any) -> Any:
    """The first row of the block that `row` belongs to, and that block's number of rows."""
    size = block_rows(num_rows, max_rows)
    first = row // size * size
    return first, min(size, num_rows - first)


@jit()
def widen_row(x: Any, row: Any, num_rows: Any, max_rows: Any, depth: Any, blocks: Any) -> None:
    """bf16 bits [columns] → float32, as row `row` of the blocks of `num_rows` rows; zeros follow up to `depth`."""
    first, step = block_of(row, num_rows, max_rows)
    own = blocks[first * depth + row - first : (first + step) * depth]
    for column in range(x.size):
        own[column * step] = float_of_bf16(x[column])
    for column in range(x.size, depth):
        own[column * step] = np.float32(0)


def make_multiply(registers: Registers, weights_format: Bf16Pairs | Bf16Dots) -> Any:
    """`multiply` for one kind of registers and of instructions."""
    max_rows, give_out = registers.max_rows, make_give_out(native=False)
    places = 2 if isinstance(weights_format, Bf16Dots) else 1  # of the sum, for each factor
    multiply_block = make_multiply_block(weights_format, BF16_TILE_BYTES, registers, max_rows)

    @jit(inline=True, variant=f"{registers}.{type(weights_format).__name__}")
    def multiply(
        blocks: Any,
        num_rows: Any,
        depth: Any,
        weights: Any,
        bias: Any,
        first_panel: Any,
        end_panel: Any,
        kind: Any,
        other: Any,
        out: Any,
        sums: Any,
    ) -> None:
        """Columns `first_panel` * 32 to `end_panel` * 32 of the product.

        `blocks`: float32 of `widen_row`, or words of dots.pair_row. `weights`: bf16 bits, packed. `bias`: float32
        [columns]. `other` and `out`: bf16 bits [rows * columns], or what `kind` says: see outputs.ROUNDED. `sums`:
        float32 [32 * 32].
        """
        row_size, step = out.size // num_rows, block_rows(num_rows, max_rows)
        panel_size = depth * PANEL
        group = max(1, CACHED_BYTES // 2 // panel_size)
        for start in range(first_panel, end_panel, group):
            for row in range(0, num_rows, step):
                rows = min(step, num_rows - row)
                for panel in range(start, min(start + group, end_panel)):
                    first = panel * panel_size
                    block = row * (depth // places)
                    multiply_block(rows, blocks, block, weights, first, depth // 32, bias, panel * PANEL, sums)
                    give_out(sums, 0, rows, kind, other, out, row, row_size, panel)

    return multiply


def make_multiply_int8(registers: Registers) -> Any:
    """`multiply_int8` for one kind of registers."""
    max_rows, give_out = registers.max_rows, make_give_out(native=False)
    multiply_block = make_multiply_block(Int8Bytes(), _INT8_TILE_BYTES, registers, max_rows)
    scale_rows = _make_scale_rows(registers)

    @jit(inline=True, variant=registers)
    def multiply_int8(
        blocks: Any,
        num_rows: Any,
        depth: Any,
        weights: Any,
        column_scales: Any,
        bias: Any,
        first_panel: Any,
        end_panel: Any,
        kind: Any,
        other: Any,
        out: Any,
        zeros: Any,
        sums: Any,
    ) -> None:
        """Like `multiply`, with int8 weights; `column_scales`: float32 [columns]; `zeros`: float32 [32]."""
        row_size, step = out.size // num_rows, block_rows(num_rows, max_rows)
        panel_size = depth * PANEL
        group = max(1, CACHED_BYTES // panel_size)
        for start in range(first_panel, end_panel, group):
            for row in range(0, num_rows, step):
                rows = min(step, num_rows - row)
                for panel in range(start, min(start + group, end_panel)):
                    first = panel * panel_size
                    multiply_block(rows, blocks, row * depth, weights, first, depth // TILE, zeros, 0, sums)
                    scale_rows(sums, rows, column_scales, bias, panel * PANEL)
                    give_out(sums, 0, rows, kind, other, out, row, row_size, panel)

    return multiply_int8


def make_multiply_block(weights_format: Weights, tile_bytes: int, registers: Registers, max_rows: int) -> Any:
    """The product of a block of up to `max_rows` rows and a panel; `tile_bytes`: of a tile for all its columns."""
    initial_type = ir.VectorType(weights_format.sums, registers.lanes)

    @intrinsic
    def multiply_block(
        _typing: Any,
        num_rows: Any,
        blocks: Any,
        first: Any,
        weights: Any,
        first_weight: Any,
        num_tiles: Any,
        initial: Any,
        first_initial: Any,
        sums: Any,
    ) -> Any:
        """sums[row * 32 + column] = initial[first_initial + column] + the product of a block and a panel."""

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            num_rows, blocks, first, weights, first_weight, num_tiles, initial, first_initial, sums = args
            factors = address(context, builder, signature.args[1], blocks, first, weights_format.factor)
            panel = address(context, builder, signature.args[3], weights, first_weight, ir.IntType(8))
            start = address(context, builder, signature.args[6], initial, first_initial, weights_format.sums)
            target = address(context, builder, signature.args[8], sums, integer(0), weights_format.sums)

            def emit(rows: int) -> None:
                width = registers.columns(rows, PANEL)
                for column in range(0, PANEL, width):
                    emit_block(
                        builder,
                        weights_format,
                        registers,
                        rows,
                        range(column, column + width),
                        Rows(0, 1),
                        factors,
                        num_tiles,
                        nth_tile(builder, panel, tile_bytes),
                        lambda _row, column: load_vector(builder, start, integer(column), initial_type),
                        lambda row, column, own: store_vector(builder, target, integer(row * PANEL + column), own),
                        is_streamed=True,
                    )

            switch_rows(builder, num_rows, max_rows, emit)
            return context.get_dummy_value()

        numbers = types.int64
        return (
            types.void(numbers, blocks, numbers, weights, numbers, numbers, initial, numbers, sums),
            generate,
        )

    return multiply_block


@functools.cache
def _make_scale_rows(registers: Registers) -> Any:
    floats = ir.VectorType(_FLOAT, registers.lanes)

    @intrinsic
    def scale_row(_typing: Any, sums: Any, first: Any, scales: Any, bias: Any, column: Any) -> Any:
        """sums[first ..] = sums[first ..] * scales[column ..] + bias[column ..], for 32 columns"""

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            sums, first, scales, bias, column = args
            target = address(context, builder, signature.args[0], sums, first, _FLOAT)
            factors = address(context, builder, signature.args[2], scales, column, _FLOAT)
            added = address(context, builder, signature.args[3], bias, column, _FLOAT)
            for place in map(integer, range(0, PANEL, registers.lanes)):
                own, factor, other = (load_vector(builder, start, place, floats) for start in (target, factors, added))
                store_vector(builder, target, place, multiply_add(builder, own, factor, other))
            return context.get_dummy_value()

        return types.void(sums, types.int64, scales, bias, types.int64), generate

    @jit(variant=registers)
    def scale_rows(sums: Any, num_rows: Any, scales: Any, bias: Any, column: Any) -> None:
        for row in range(num_rows):
            scale_row(sums, row * PANEL, scales, bias, column)

    return scale_rows
