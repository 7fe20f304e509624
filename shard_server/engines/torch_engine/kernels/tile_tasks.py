"""The tasks (tasks.py) of kernels that use matrix tiles: products and attention. Threads share a product's columns.

Each docstring lists the arguments of its task.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.np.numpy_support import carray

from shard_server.engines.torch_engine.kernels.amx import aligned_zeros, tile_configuration
from shard_server.engines.torch_engine.kernels.attention_scratch import AttentionShape, scratch_at
from shard_server.engines.torch_engine.kernels.compiled import (
    bf16_at,
    bytes_at,
    float_of_bits,
    floats_at,
    int8_at,
    integers_at,
    jit,
    words_at,
)
from shard_server.engines.torch_engine.kernels.tasks import ROWS, share
from shard_server.engines.torch_engine.kernels.tile_kernels import attend_pieces
from shard_server.engines.torch_engine.kernels.tile_matmul import FLOATS, GATED, PANEL, Scratch, multiply, take_column
from shard_server.engines.torch_engine.kernels.tile_matmul_int8 import multiply_int8, split_row

_SUMS = PANEL * PANEL
_CONFIGURATION_BYTES = 64
_SCRATCH_BYTES = 2 * 4 * _SUMS + 2 * _CONFIGURATION_BYTES


def new_scratches(num_threads: int) -> np.ndarray[Any, Any]:
    """uint8: the memory of a tile_matmul.Scratch for each thread"""
    scratches = aligned_zeros(num_threads * _SCRATCH_BYTES, np.uint8)
    for configurations in scratches.reshape(num_threads, -1)[:, 2 * 4 * _SUMS :]:
        configurations.reshape(2, -1)[:] = tile_configuration()
    return scratches


@jit()
def multiply_columns(task: Any, part: Any, num_parts: Any) -> None:
    """out, scratches, depth, columns, kind (see tile_matmul.ROUNDED), other, bias, weights, x (bf16 [rows, depth])"""
    out, scratches, depth, num_columns, kind, other, bias, weights = _operands(task)
    x = task[11]
    out_size = _out_size(task[ROWS], num_columns, kind)
    first, end = share(num_columns // PANEL, part, num_parts)
    multiply(
        carray(bf16_at(x), (task[ROWS] * depth,)),
        depth,
        carray(bf16_at(weights), (num_columns * depth,)),
        carray(floats_at(bias), (num_columns,)),
        first,
        end,
        kind,
        carray(bf16_at(other), (out_size,)),
        carray(bf16_at(out), (out_size,)),
        _scratch_at(scratches + part * _SCRATCH_BYTES),
    )


@jit()
def multiply_int8_columns(task: Any, part: Any, num_parts: Any) -> None:
    """out, scratches, depth, columns, kind, other, bias, weights: as for `multiply_columns`; digits and row_scales of
    `split_rows`, column_scales (float32 [columns])"""
    out, scratches, depth, num_columns, kind, other, bias, weights = _operands(task)
    digits, row_scales, column_scales = task[11], task[12], task[13]
    out_size = _out_size(task[ROWS], num_columns, kind)
    first, end = share(num_columns // PANEL, part, num_parts)
    multiply_int8(
        carray(int8_at(digits), (2 * task[ROWS] * depth,)),
        carray(floats_at(row_scales), (task[ROWS],)),
        depth,
        carray(int8_at(weights), (num_columns * depth,)),
        carray(floats_at(column_scales), (num_columns,)),
        carray(floats_at(bias), (num_columns,)),
        first,
        end,
        kind,
        carray(bf16_at(other), (out_size,)),
        carray(bf16_at(out), (out_size,)),
        _scratch_at(scratches + part * _SCRATCH_BYTES),
    )


@jit()
def split_rows(task: Any, part: Any, num_parts: Any) -> None:
    """x (bf16 [rows, columns]), columns, depth, digits (int8 [2, rows, depth]; zeros after the columns), scales
    (float32 [rows]): (first + second / 254) * scale is the row, rounded"""
    x, num_columns, depth, digits, scales = task[3], task[4], task[5], task[6], task[7]
    row_scales = carray(floats_at(scales), (task[ROWS],))
    first, end = share(task[ROWS], part, num_parts)
    for row in range(first, end):
        row_scales[row] = split_row(
            carray(bf16_at(x + row * num_columns * 2), (num_columns,)),
            carray(int8_at(digits + row * depth), (depth,)),
            carray(int8_at(digits + (task[ROWS] + row) * depth), (depth,)),
        )


@jit()
def look_up_columns(task: Any, part: Any, num_parts: Any) -> None:
    """indices (int64 [rows]), weights (packed bf16), depth, columns, out (bf16 [rows, depth]): columns of weights"""
    indices, weights, half, num_columns, out = task[3], task[4], task[5] // 2, task[6], task[7]
    columns = carray(integers_at(indices), (task[ROWS],))
    words = carray(words_at(weights), (num_columns * half,))
    first, end = share(task[ROWS], part, num_parts)
    for row in range(first, end):
        take_column(words, columns[row], carray(words_at(out + row * half * 4), (half,)))


@jit()
def attend_rows(task: Any, part: Any, num_parts: Any) -> None:
    """plan (see TilePlan.words), queries (bf16, rows `stride` apart), stride, out (bf16 [rows, query_size]), layer,
    window, constants (see TileAttention)"""
    plan, queries, stride, out, layer, window = task[3], task[4], task[5], task[6], task[7], task[8]
    (
        pool,
        pool_size,
        scratches,
        scratch_size,
        scale,
        block_size,
        num_kv_heads,
        group_size,
        head_dim,
        block_stride,
        token_size,
    ) = carray(integers_at(task[9]), (11,))
    shape = AttentionShape(block_size, num_kv_heads, group_size, head_dim, block_stride, token_size)
    row_size = num_kv_heads * group_size * head_dim
    num_shares, tables_size = carray(integers_at(plan), (2,))
    ends = carray(integers_at(plan + 16), (num_shares + 1,))
    pieces = plan + 16 + (num_shares + 1) * 8
    tables = carray(integers_at(pieces + ends[num_shares] * 8), (tables_size,))
    for index in range(part, num_shares, num_parts):
        attend_pieces(
            carray(bf16_at(pool), (pool_size,)),
            layer,
            tables,
            carray(integers_at(pieces + ends[index] * 8), (ends[index + 1] - ends[index],)),
            shape,
            carray(bf16_at(queries), (task[ROWS] * stride,)),
            stride,
            carray(bf16_at(out), (task[ROWS] * row_size,)),
            window,
            float_of_bits(np.uint32(scale)),
            scratch_at(scratches + part * scratch_size, shape),
        )


@jit(inline=True)
def _operands(task: Any) -> Any:
    """The arguments that all products have; see `multiply_columns`."""
    return task[3], task[4], task[5], task[6], task[7], task[8], task[9], task[10]


@jit(inline=True)
def _out_size(num_rows: Any, num_columns: Any, kind: Any) -> Any:
    """The size of `out` in bf16 numbers"""
    if kind == GATED:
        return num_rows * num_columns // 2
    return num_rows * num_columns * 2 if kind == FLOATS else num_rows * num_columns


@jit()
def _scratch_at(address: Any) -> Any:
    configurations = address + 2 * 4 * _SUMS
    return Scratch(
        carray(floats_at(address), (_SUMS,)),
        carray(floats_at(address + 4 * _SUMS), (_SUMS,)),
        carray(bytes_at(configurations), (_CONFIGURATION_BYTES,)),
        carray(bytes_at(configurations + _CONFIGURATION_BYTES), (_CONFIGURATION_BYTES,)),
    )
