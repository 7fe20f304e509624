"""Attention's products in vector registers, in float32.

A tile's query rows lie in blocks, interleaved, so that one pointer reaches the rows of a block; the weights replace the
scores, row by row.
"""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir
from numba import types

from shard_server.engines.torch_engine.kernels.attention.attend import VALUE_TILE_NUMBERS, Multiplies
from shard_server.engines.torch_engine.kernels.attention.scratch import CHUNK, TILE
from shard_server.engines.torch_engine.kernels.codegen.compiled import float_of_bf16, jit
from shard_server.engines.torch_engine.kernels.codegen.llvm import (
    address,
    constant,
    integer,
    intrinsic,
    load_vector,
    store_vector,
)
from shard_server.engines.torch_engine.kernels.codegen.vector_blocks import (
    Bf16Pairs,
    Registers,
    Rows,
    emit_block,
    nth_tile,
    switch_rows,
)

DIM_STEP = 32
"""The number of a head's numbers must be a multiple of this."""
_KEY_TILE_BYTES = 1024
"""A tile has so many bytes: 32 numbers of each of 16 keys."""
_FLOAT = ir.FloatType()


@functools.cache
def vector_multiplies(registers: Registers) -> Multiplies:
    """The products of `attend_pieces` for one kind of registers."""
    block = 4 if registers.max_rows < 8 else 8
    score_block, add_block = _make_score_block(registers, block), _make_add_block(registers, block)

    @jit(variant=registers)
    def begin(_scratch: Any, _rows: Any) -> None:
        pass

    @jit(inline=True, variant=registers)
    def take_query(queries: Any, source: Any, scratch: Any, first: Any, row: Any, dim: Any) -> None:
        target = first + row // block * block * dim + row % block
        for column in range(dim):
            scratch.wide_queries[target + column * block] = float_of_bf16(queries[source + column])

    @jit(inline=True, variant=registers)
    def score(pool: Any, first_key: Any, first_query: Any, rows: Any, width: Any, dim: Any, scratch: Any) -> None:
        for row in range(0, rows, block):
            num_rows, query = min(block, rows - row), first_query + row * dim
            for key in range(0, width, TILE):
                place = scratch.places[key // TILE] + first_key
                target = row * CHUNK + key
                score_block(num_rows, scratch.wide_queries, query, pool, place, dim // 32, scratch.scores, target)

    @jit(inline=True, variant=registers)
    def weights(scratch: Any) -> Any:
        return scratch.scores

    @jit(inline=True, variant=registers)
    def add_values(pool: Any, first_value: Any, first_sum: Any, rows: Any, width: Any, dim: Any, scratch: Any) -> None:
        for row in range(0, rows, block):
            num_rows, own, first = min(block, rows - row), row * CHUNK, first_sum + row * dim
            for column in range(0, dim, DIM_STEP):
                value = first_value + column * TILE
                add_block(
                    num_rows, scratch.scores, own, pool, scratch.places, value, width // TILE,
                    scratch.sums, first + column, dim,
                )  # fmt: skip

    return Multiplies(
        name=str(registers),
        native_rounding=False,
        begin=begin,
        take_query=take_query,
        score=score,
        weights=weights,
        add_values=add_values,
    )


def _make_score_block(registers: Registers, block: int) -> Any:
    """`block`: the rows between which a query's numbers lie"""
    zeros = constant(ir.VectorType(_FLOAT, registers.lanes), 0.0)

    @intrinsic
    def score_block(
        _typing: Any,
        num_rows: Any,
        queries: Any,
        first: Any,
        pool: Any,
        first_key: Any,
        num_tiles: Any,
        scores: Any,
        target: Any,
    ) -> Any:
        """scores[target + row * CHUNK + key] = queries times 16 keys"""

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            num_rows, queries, first, pool, first_key, num_tiles, scores, target = args
            factors = address(context, builder, signature.args[1], queries, first, _FLOAT)
            keys = address(context, builder, signature.args[3], pool, first_key, ir.IntType(8))
            out = address(context, builder, signature.args[6], scores, target, _FLOAT)

            def emit(rows: int) -> None:
                emit_block(
                    builder,
                    Bf16Pairs(),
                    registers,
                    rows,
                    range(TILE),
                    Rows(block, 1),
                    factors,
                    num_tiles,
                    nth_tile(builder, keys, _KEY_TILE_BYTES),
                    lambda _row, _column: zeros,
                    lambda row, column, own: store_vector(builder, out, integer(row * CHUNK + column), own),
                )

            switch_rows(builder, num_rows, block, emit)
            return context.get_dummy_value()

        numbers = types.int64
        return types.void(numbers, queries, numbers, pool, numbers, numbers, scores, numbers), generate

    return score_block


def _make_add_block(registers: Registers, block: int) -> Any:
    floats = ir.VectorType(_FLOAT, registers.lanes)

    @intrinsic
    def add_block(
        _typing: Any,
        num_rows: Any,
        weights: Any,
        first: Any,
        pool: Any,
        places: Any,
        first_value: Any,
        num_tiles: Any,
        sums: Any,
        first_sum: Any,
        sum_stride: Any,
    ) -> Any:
        """Add 32 columns of values, times the weights, to sums[first_sum + row * sum_stride ..]. Tile t of the values
        begins at pool[places[t] + first_value]."""

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            num_rows, weights, first, pool, places, first_value, num_tiles, sums, first_sum, stride = args
            factors = address(context, builder, signature.args[1], weights, first, _FLOAT)
            target = address(context, builder, signature.args[7], sums, first_sum, _FLOAT)

            def tile_at(number: Any) -> Any:
                own = address(context, builder, signature.args[4], places, number, ir.IntType(64))
                place = builder.add(builder.load(own), first_value)
                return address(context, builder, signature.args[3], pool, place, ir.IntType(8))

            def index(row: int, column: int) -> Any:
                return builder.add(builder.mul(stride, integer(row)), integer(column))

            def emit(rows: int) -> None:
                width = registers.columns(rows, DIM_STEP)
                for column in range(0, DIM_STEP, width):
                    emit_block(
                        builder,
                        Bf16Pairs(VALUE_TILE_NUMBERS // 32),
                        registers,
                        rows,
                        range(column, column + width),
                        Rows(1, CHUNK),
                        factors,
                        num_tiles,
                        tile_at,
                        lambda row, column: load_vector(builder, target, index(row, column), floats),
                        lambda row, column, own: store_vector(builder, target, index(row, column), own),
                    )

            switch_rows(builder, num_rows, block, emit)
            return context.get_dummy_value()

        numbers = types.int64
        return (
            types.void(numbers, weights, numbers, pool, places, numbers, numbers, sums, numbers, numbers),
            generate,
        )

    return add_block
