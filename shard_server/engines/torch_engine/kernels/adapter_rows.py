"""LoRA adapters in compiled code: what one adds to a row, and the gate of rows whose factors were changed.

Each row is computed by itself, with the adapter whose table its address names: its bits depend on nothing else. Tasks
are defined in tasks.py; threads share the rows. Each docstring lists the arguments of its task.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import numpy as np
from numba.np.numpy_support import carray

from shard_server.engines.torch_engine.kernels.codegen.compiled import bf16_at, floats_at, integers_at, jit
from shard_server.engines.torch_engine.kernels.codegen.tasks import ROWS, share
from shard_server.engines.torch_engine.kernels.codegen.vector_ops import add_scaled, dot, rounding_ops
from shard_server.engines.torch_engine.kernels.products.outputs import PANEL, TILE

ENTRY_SIZE: Final = 3
"""An entry of an adapter's table has so many numbers: the addresses of A (bf16 [rank, columns]) and B (bf16 [rank,
columns of the output]), and the rank, which is 0 where the adapter changes nothing."""
_rounded_sum: Final = rounding_ops(native=False).rounded_sum


@jit()
def adapt_rows(task: Any, part: Any, num_parts: Any) -> None:
    """adapters (int64 [rows]: the address of a row's table, or 0), entry, x (bf16 [rows, columns]), columns, scratches
    (float32 [parts, scratch size]), scratch size, out, size of its rows, columns of the product, alternates: adds
    B A x to each row, in bf16; or, if `alternates`, in float32, with other tiles of 16 columns in between"""
    adapters, entry, x, num_columns, scratches, scratch_size = task[3], task[4], task[5], task[6], task[7], task[8]
    out, row_size, num_out, alternates = task[9], task[10], task[11], task[12]
    addresses = carray(integers_at(adapters), (task[ROWS],))
    sums = carray(floats_at(scratches + part * scratch_size * 4), (scratch_size,))
    first, end = share(task[ROWS], part, num_parts)
    for row in range(first, end):
        if not addresses[row]:
            continue
        matrices = carray(integers_at(addresses[row] + entry * ENTRY_SIZE * 8), (ENTRY_SIZE,))
        rank = matrices[2]
        if not rank:
            continue
        numbers = carray(bf16_at(x + row * num_columns * 2), (num_columns,))
        a = carray(bf16_at(matrices[0]), (rank * num_columns,))
        b = carray(bf16_at(matrices[1]), (rank * num_out,))
        for column in range(num_out):
            sums[column] = np.float32(0)
        for place in range(rank):
            factor = dot(numbers, 0, a, place * num_columns, num_columns)
            add_scaled(sums, 0, b, place * num_out, num_out, factor)
        if alternates:
            floats = carray(floats_at(out + row * row_size * 4), (2 * num_out,))
            for column in range(num_out):
                floats[column // TILE * PANEL + column % TILE] += sums[column]
        else:
            target = carray(bf16_at(out + row * row_size * 2), (num_out,))
            for column in range(0, num_out, TILE):
                _rounded_sum(sums, column, target, target, column)


@functools.cache
def make_gate_rows(*, native: bool) -> Any:
    """`gate_rows` for one kind of CPU; see vector_ops.rounding_ops."""
    rounded_gated = rounding_ops(native=native).rounded_gated

    @jit(variant="native" if native else "portable")
    def gate_rows(task: Any, part: Any, num_parts: Any) -> None:
        """x (float32 [rows, 2 * columns]: the product of kind FLOATS of a layer for GATED), columns, out (bf16 [rows,
        columns]): the bits that the kind GATED gives"""
        x, num_columns, out = task[3], task[4], task[5]
        first, end = share(task[ROWS], part, num_parts)
        for row in range(first, end):
            factors = carray(floats_at(x + row * num_columns * 8), (2 * num_columns,))
            target = carray(bf16_at(out + row * num_columns * 2), (num_columns,))
            for column in range(0, num_columns, TILE):
                rounded_gated(factors, 2 * column, 2 * column + TILE, target, column)

    return gate_rows
