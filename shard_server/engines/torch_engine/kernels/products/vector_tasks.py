"""The tasks (tasks.py) of products in vector registers. Threads share a product's columns.

Each docstring lists the arguments of its task.
"""

from __future__ import annotations

from typing import Any

from numba.np.numpy_support import carray

from shard_server.engines.torch_engine.kernels.codegen.compiled import bf16_at, floats_at, int8_at, jit, words_at
from shard_server.engines.torch_engine.kernels.codegen.group_blocks import PairProducts, pair_products
from shard_server.engines.torch_engine.kernels.codegen.tasks import ROWS, share
from shard_server.engines.torch_engine.kernels.codegen.vector_blocks import Bf16Dots, Bf16Pairs, Registers
from shard_server.engines.torch_engine.kernels.products import dots
from shard_server.engines.torch_engine.kernels.products.groups import make_group_tasks
from shard_server.engines.torch_engine.kernels.products.outputs import (
    PANEL,
    SCRATCH_FLOATS,
    ProductTasks,
    no_task,
    operands,
    out_size,
)
from shard_server.engines.torch_engine.kernels.products.vectors import make_multiply, make_multiply_int8, widen_row


def make_float_tasks(registers: Registers) -> ProductTasks:
    """In float32."""
    max_rows = registers.max_rows
    multiply_int8 = make_multiply_int8(registers)

    @jit(variant=registers)
    def widen_rows(task: Any, part: Any, num_parts: Any) -> None:
        """x (bf16 [rows, columns]), columns, depth, blocks (float32 [rows, depth]; see `widen_row`)"""
        x, num_columns, depth, blocks = task[3], task[4], task[5], task[6]
        first, end = share(task[ROWS], part, num_parts)
        out = carray(floats_at(blocks), (task[ROWS] * depth,))
        for row in range(first, end):
            source = carray(bf16_at(x + row * num_columns * 2), (num_columns,))
            widen_row(source, row, task[ROWS], max_rows, depth, out)

    @jit(variant=registers)
    def multiply_int8_columns(task: Any, part: Any, num_parts: Any) -> None:
        """out, scratches, depth, columns, kind, other, bias, weights, blocks: as for `multiply_columns`; column_scales
        (float32 [columns])"""
        out, scratches, depth, num_columns, kind, other, bias, weights = operands(task)
        num_rows, blocks, column_scales = task[ROWS], task[11], task[12]
        num_out = out_size(num_rows, num_columns, kind)
        first, end = share(num_columns // PANEL, part, num_parts)
        scratch = scratches + part * SCRATCH_FLOATS * 4
        multiply_int8(
            carray(floats_at(blocks), (num_rows * depth,)),
            num_rows,
            depth,
            carray(int8_at(weights), (num_columns * depth,)),
            carray(floats_at(column_scales), (num_columns,)),
            carray(floats_at(bias), (num_columns,)),
            first,
            end,
            kind,
            carray(bf16_at(other), (num_out,)),
            carray(bf16_at(out), (num_out,)),
            carray(floats_at(scratch + PANEL * PANEL * 4), (PANEL,)),
            carray(floats_at(scratch), (PANEL * PANEL,)),
        )

    multiply_columns = _make_multiply_columns(registers, Bf16Pairs())
    groups = make_group_tasks(registers, pair_products(registers), SCRATCH_FLOATS * 4)
    return ProductTasks(widen_rows, no_task, multiply_columns, multiply_int8_columns, *groups)


def make_dot_tasks(registers: Registers) -> ProductTasks:
    """By AVX-512's dot products."""
    max_rows = registers.max_rows
    multiply_int8 = dots.make_multiply_int8(registers)

    @jit(variant=f"dots.{registers}")
    def pair_rows(task: Any, part: Any, num_parts: Any) -> None:
        """x (bf16 [rows, columns]), columns, depth, blocks (words [rows, depth / 2]; see `pair_row`)"""
        x, num_columns, num_words, blocks = task[3], task[4], task[5] // 2, task[6]
        first, end = share(task[ROWS], part, num_parts)
        out = carray(words_at(blocks), (task[ROWS] * num_words,))
        for row in range(first, end):
            source = carray(words_at(x + row * num_columns * 2), (num_columns // 2,))
            dots.pair_row(source, row, task[ROWS], max_rows, num_words, out)

    @jit(variant=f"dots.{registers}")
    def split_rows(task: Any, part: Any, num_parts: Any) -> None:
        """x (bf16 [rows, columns]), columns, depth, blocks (words [2 * rows, depth / 4]; see dots.split_row), scales
        (float32 [rows])"""
        x, num_columns, num_words, blocks, scales = task[3], task[4], task[5] // 4, task[6], task[7]
        row_scales = carray(floats_at(scales), (task[ROWS],))
        first, end = share(task[ROWS], part, num_parts)
        out = carray(words_at(blocks), (2 * task[ROWS] * num_words,))
        for row in range(first, end):
            source = carray(bf16_at(x + row * num_columns * 2), (num_columns,))
            row_scales[row] = dots.split_row(source, row, task[ROWS], max_rows // 2, num_words, out)

    @jit(variant=f"dots.{registers}")
    def multiply_int8_columns(task: Any, part: Any, num_parts: Any) -> None:
        """out, scratches, depth, columns, kind, other, bias, weights: as for `multiply_columns`; blocks and row_scales
        of `split_rows`, column_scales (float32 [columns]), corrections (int32 [columns]; see dots.multiply_int8)"""
        out, scratches, depth, num_columns, kind, other, bias, weights = operands(task)
        num_rows, blocks, row_scales, column_scales, corrections = task[ROWS], task[11], task[12], task[13], task[14]
        num_out = out_size(num_rows, num_columns, kind)
        first, end = share(num_columns // PANEL, part, num_parts)
        multiply_int8(
            carray(words_at(blocks), (2 * num_rows * (depth // 4),)),
            carray(floats_at(row_scales), (num_rows,)),
            depth,
            carray(int8_at(weights), (num_columns * depth,)),
            carray(words_at(corrections), (num_columns,)),
            carray(floats_at(column_scales), (num_columns,)),
            carray(floats_at(bias), (num_columns,)),
            first,
            end,
            kind,
            carray(bf16_at(other), (num_out,)),
            carray(bf16_at(out), (num_out,)),
            carray(floats_at(scratches + part * SCRATCH_FLOATS * 4), (PANEL * PANEL,)),
        )

    multiply_columns = _make_multiply_columns(registers, Bf16Dots())
    groups = make_group_tasks(registers, PairProducts.ACCUMULATED, SCRATCH_FLOATS * 4)
    return ProductTasks(pair_rows, split_rows, multiply_columns, multiply_int8_columns, *groups)


def _make_multiply_columns(registers: Registers, weights_format: Bf16Pairs | Bf16Dots) -> Any:
    multiply = make_multiply(registers, weights_format)
    has_words = isinstance(weights_format, Bf16Dots)
    factors_at, places = (words_at, 2) if has_words else (floats_at, 1)

    @jit(variant=f"{registers}.{type(weights_format).__name__}")
    def multiply_columns(task: Any, part: Any, num_parts: Any) -> None:
        """out, scratches, depth, columns, kind (see outputs.ROUNDED), other, bias, weights, blocks of `widen_rows` or
        `pair_rows`"""
        out, scratches, depth, num_columns, kind, other, bias, weights = operands(task)
        num_rows, blocks = task[ROWS], task[11]
        num_out = out_size(num_rows, num_columns, kind)
        first, end = share(num_columns // PANEL, part, num_parts)
        multiply(
            carray(factors_at(blocks), (num_rows * (depth // places),)),
            num_rows,
            depth,
            carray(bf16_at(weights), (num_columns * depth,)),
            carray(floats_at(bias), (num_columns,)),
            first,
            end,
            kind,
            carray(bf16_at(other), (num_out,)),
            carray(bf16_at(out), (num_out,)),
            carray(floats_at(scratches + part * SCRATCH_FLOATS * 4), (PANEL * PANEL,)),
        )

    return multiply_columns
