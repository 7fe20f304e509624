"""The tasks (tasks.py) of products on AMX tiles. Threads share a product's columns.

Each docstring lists the arguments of its task.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.np.numpy_support import carray

from shard_server.engines.torch_engine.kernels.codegen.amx import tile_configuration
from shard_server.engines.torch_engine.kernels.codegen.compiled import (
    aligned_zeros,
    bf16_at,
    bytes_at,
    floats_at,
    int8_at,
    jit,
)
from shard_server.engines.torch_engine.kernels.codegen.tasks import ROWS, share
from shard_server.engines.torch_engine.kernels.products.amx_bf16 import ProductScratch, multiply
from shard_server.engines.torch_engine.kernels.products.amx_int8 import multiply_int8, split_row
from shard_server.engines.torch_engine.kernels.products.outputs import PANEL, operands, out_size

_SUMS = PANEL * PANEL
_CONFIGURATION_BYTES = 64
SCRATCH_BYTES = 2 * 4 * _SUMS + 2 * _CONFIGURATION_BYTES


def new_amx_scratches(num_threads: int) -> np.ndarray[Any, Any]:
    """uint8: the memory of a tile_matmul.Scratch for each thread"""
    scratches = aligned_zeros(num_threads * SCRATCH_BYTES, np.uint8)
    for configurations in scratches.reshape(num_threads, -1)[:, 2 * 4 * _SUMS :]:
        configurations.reshape(2, -1)[:] = tile_configuration()
    return scratches


@jit()
def multiply_columns(task: Any, part: Any, num_parts: Any) -> None:
    """out, scratches, depth, columns, kind (see tile_matmul.ROUNDED), other, bias, weights, x (bf16 [rows, depth])"""
    out, scratches, depth, num_columns, kind, other, bias, weights = operands(task)
    x = task[11]
    num_out = out_size(task[ROWS], num_columns, kind)
    first, end = share(num_columns // PANEL, part, num_parts)
    multiply(
        carray(bf16_at(x), (task[ROWS] * depth,)),
        depth,
        carray(bf16_at(weights), (num_columns * depth,)),
        carray(floats_at(bias), (num_columns,)),
        first,
        end,
        kind,
        carray(bf16_at(other), (num_out,)),
        carray(bf16_at(out), (num_out,)),
        scratch_at(scratches + part * SCRATCH_BYTES),
    )


@jit()
def multiply_int8_columns(task: Any, part: Any, num_parts: Any) -> None:
    """out, scratches, depth, columns, kind, other, bias, weights: as for `multiply_columns`; digits and row_scales of
    `split_rows`, column_scales (float32 [columns])"""
    out, scratches, depth, num_columns, kind, other, bias, weights = operands(task)
    digits, row_scales, column_scales = task[11], task[12], task[13]
    num_out = out_size(task[ROWS], num_columns, kind)
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
        carray(bf16_at(other), (num_out,)),
        carray(bf16_at(out), (num_out,)),
        scratch_at(scratches + part * SCRATCH_BYTES),
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
def scratch_at(address: Any) -> Any:
    configurations = address + 2 * 4 * _SUMS
    return ProductScratch(
        carray(floats_at(address), (_SUMS,)),
        carray(floats_at(address + 4 * _SUMS), (_SUMS,)),
        carray(bytes_at(configurations), (_CONFIGURATION_BYTES,)),
        carray(bytes_at(configurations + _CONFIGURATION_BYTES), (_CONFIGURATION_BYTES,)),
    )
