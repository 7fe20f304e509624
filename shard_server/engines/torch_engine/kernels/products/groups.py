"""Matrix products with grouped weights, and their tasks; see codegen/group_blocks.py.

Each docstring of a task lists its arguments.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.np.numpy_support import carray

from shard_server.engines.torch_engine.kernels.codegen.compiled import (
    bf16_at,
    bf16_of_float,
    bytes_at,
    float_of_bits,
    floats_at,
    int8_at,
    integers_at,
    jit,
    words_at,
)
from shard_server.engines.torch_engine.kernels.codegen.group_blocks import (
    FORMS,
    GROUP,
    ROW_WORDS,
    GroupForm,
    PairProducts,
    emit_group_block,
)
from shard_server.engines.torch_engine.kernels.codegen.llvm import (
    address,
    constant,
    integer,
    intrinsic,
    load_vector,
    multiply_add,
    spread,
    store_vector,
)
from shard_server.engines.torch_engine.kernels.codegen.tasks import ROWS, share
from shard_server.engines.torch_engine.kernels.codegen.vector_blocks import Registers, switch_rows
from shard_server.engines.torch_engine.kernels.products.outputs import PANEL, make_give_out, operands, out_size
from shard_server.engines.torch_engine.kernels.products.vectors import CACHED_BYTES, block_of, block_rows

_LIMIT = np.float32(32767)
_SMALLEST = np.float32(1e-30)
"""Replaces the largest value of a row that is all zeros."""
_ROUNDING = 12582912.0
"""1.5 * 2**23: in a float32 to which it is added, the lower bits are the nearest integer, ties to even."""


@intrinsic
def _largest_of_group(_typing: Any, x: Any, first: Any) -> Any:
    """The largest magnitude of bf16 x[first .. first + 32], as bits."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        bits = _load_group(context, builder, signature.args[0], *args)
        # Without the sign, bf16 numbers are in the order of their bits.
        largest = _reduced(builder, "umax", builder.and_(bits, constant(bits.type, 0x7FFF)))
        return builder.zext(largest, ir.IntType(32))

    return types.uint32(x, types.int64), generate


@intrinsic
def _round_group(_typing: Any, x: Any, first: Any, factor: Any, target: Any, target_first: Any) -> Any:
    """target[target_first ..] = bf16 x[first .. first + 32] * factor, rounded, as a group of a row: see ROW_WORDS."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        x, first, factor, target, target_first = args
        bits = _load_group(context, builder, signature.args[0], x, first)
        words, floats = (ir.VectorType(kind, GROUP) for kind in (ir.IntType(32), ir.FloatType()))
        wide = builder.bitcast(builder.shl(builder.zext(bits, words), constant(words, 16)), floats)
        steps = builder.fadd(builder.fmul(wide, spread(builder, factor, GROUP)), constant(floats, _ROUNDING))
        numbers = builder.trunc(builder.bitcast(steps, words), bits.type)
        total = builder.sitofp(_reduced(builder, "add", builder.sext(numbers, words)), ir.FloatType())
        own = address(context, builder, signature.args[3], target, target_first, ir.IntType(32))
        store_vector(builder, own, integer(0), builder.bitcast(numbers, ir.VectorType(ir.IntType(32), GROUP // 2)))
        builder.store(builder.bitcast(total, ir.IntType(32)), builder.gep(own, [integer(GROUP // 2)]))
        return context.get_dummy_value()

    return types.void(x, types.int64, types.float32, target, types.int64), generate


def _load_group(context: Any, builder: ir.IRBuilder, array_type: Any, array: Any, first: Any) -> Any:
    source = address(context, builder, array_type, array, first, ir.IntType(16))
    return builder.load(builder.bitcast(source, ir.VectorType(ir.IntType(16), GROUP).as_pointer()), align=2)


def _reduced(builder: ir.IRBuilder, how: str, vector: Any) -> Any:
    function_type = ir.FunctionType(vector.type.element, [vector.type])
    name = f"llvm.vector.reduce.{how}.v{vector.type.count}i{vector.type.element.width}"
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), [vector])


@jit()
def group_row(x: Any, row: Any, num_rows: Any, max_rows: Any, blocks: Any) -> Any:
    """bf16 bits [columns] → the groups of row `row` in the blocks of `num_rows` rows. A block is [groups, rows,
    ROW_WORDS]. Returns the row's scale."""
    first, step = block_of(row, num_rows, max_rows)
    num_groups = x.size // GROUP
    largest = np.uint32(0)
    for group in range(num_groups):
        largest = max(largest, _largest_of_group(x, group * GROUP))
    scale = max(float_of_bits(np.uint32(largest << np.uint32(16))), _SMALLEST) / _LIMIT
    factor = np.float32(1) / scale
    start = first * num_groups + row - first
    for group in range(num_groups):
        _round_group(x, group * GROUP, factor, blocks, (start + group * step) * ROW_WORDS)
    return scale


def make_group_tasks(registers: Registers, products: PairProducts, scratch_bytes: int) -> tuple[Any, Any]:
    """The tasks `group_rows` and `multiply_group_columns` for registers and instructions. `scratch_bytes`: of a
    thread's scratch memory."""
    max_rows, variant = registers.max_rows, f"{registers}.{products.name}"
    multiply_q4, multiply_q8, multiply_q8_16 = (_make_multiply(form, registers, products) for form in FORMS)

    @jit(variant=variant)
    def group_rows(task: Any, part: Any, num_parts: Any) -> None:
        """x (bf16 [rows, depth]), depth, blocks (words [rows, depth / 32 * ROW_WORDS]; see `group_row`), row_scales
        (float32 [rows])"""
        x, depth, blocks = task[3], task[4], task[5]
        row_scales = carray(floats_at(task[6]), (task[ROWS],))
        first, end = share(task[ROWS], part, num_parts)
        out = carray(words_at(blocks), (task[ROWS] * (depth // GROUP) * ROW_WORDS,))
        for row in range(first, end):
            own = carray(bf16_at(x + row * depth * 2), (depth,))
            row_scales[row] = group_row(own, row, task[ROWS], max_rows, out)

    @jit(variant=variant)
    def multiply_group_columns(task: Any, part: Any, num_parts: Any) -> None:
        """out, scratches, depth, columns, kind (see outputs.ROUNDED), other, bias, weights, blocks and row_scales of
        `group_rows`, the number of the weights' form in FORMS"""
        out, scratches, depth, num_columns, kind, other, bias, weights = operands(task)
        num_rows, form = task[ROWS], task[13]
        num_out, num_groups = out_size(num_rows, num_columns, kind), depth // GROUP
        first, end = share(num_columns // PANEL, part, num_parts)
        blocks = carray(words_at(task[11]), (num_rows * num_groups * ROW_WORDS,))
        others, outs = carray(bf16_at(other), (num_out,)), carray(bf16_at(out), (num_out,))
        biases = carray(floats_at(bias), (num_columns,))
        scales = carray(floats_at(task[12]), (num_rows,))
        sums = carray(floats_at(scratches + part * scratch_bytes), (PANEL * PANEL,))
        if form == 0:
            multiply_q4(blocks, scales, num_groups, weights, biases, first, end, kind, others, outs, sums)
        elif form == 1:
            multiply_q8(blocks, scales, num_groups, weights, biases, first, end, kind, others, outs, sums)
        else:
            multiply_q8_16(blocks, scales, num_groups, weights, biases, first, end, kind, others, outs, sums)

    return group_rows, multiply_group_columns


def _make_multiply(form: GroupForm, registers: Registers, products: PairProducts) -> Any:
    max_rows, give_out, tile_bytes = registers.max_rows, make_give_out(native=False), form.tile_bytes
    multiply_block = _make_multiply_block(form, registers, products)

    @jit(variant=f"{registers}.{products.name}.{form.name}")
    def multiply(
        blocks: Any,
        row_scales: Any,
        num_groups: Any,
        weights: Any,
        bias: Any,
        first_panel: Any,
        end_panel: Any,
        kind: Any,
        other: Any,
        out: Any,
        sums: Any,
    ) -> None:
        """Columns `first_panel` * 32 to `end_panel` * 32 of the product; `weights` is an address. The rest is as in
        vectors.multiply."""
        num_rows = row_scales.size
        row_size, step = out.size // num_rows, block_rows(num_rows, max_rows)
        panel_bytes = num_groups * tile_bytes
        together = max(1, CACHED_BYTES // panel_bytes)
        for start in range(first_panel, end_panel, together):
            for row in range(0, num_rows, step):
                rows = min(step, num_rows - row)
                for panel in range(start, min(start + together, end_panel)):
                    block = row * num_groups * ROW_WORDS
                    tiles = carray(bytes_at(weights + panel * panel_bytes), (panel_bytes,))
                    multiply_block(rows, blocks, block, tiles, num_groups, row_scales, row, bias, panel * PANEL, sums)
                    give_out(sums, 0, rows, kind, other, out, row, row_size, panel)

    return multiply


def _make_multiply_block(form: GroupForm, registers: Registers, products: PairProducts) -> Any:
    floats = ir.VectorType(ir.FloatType(), registers.lanes)

    @intrinsic
    def multiply_block(
        _typing: Any,
        num_rows: Any,
        blocks: Any,
        first: Any,
        tiles: Any,
        num_groups: Any,
        row_scales: Any,
        first_row: Any,
        bias: Any,
        column: Any,
        sums: Any,
    ) -> Any:
        """sums[row * 32 + place] = bias[column + place] + the product of a block and a panel. The block's row 0 has the
        scale row_scales[first_row]."""

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            num_rows, blocks, first, tiles, num_groups, row_scales, first_row, bias, column, sums = args
            rows = address(context, builder, signature.args[1], blocks, first, ir.IntType(32))
            panel = address(context, builder, signature.args[3], tiles, integer(0), ir.IntType(8))
            scales = address(context, builder, signature.args[5], row_scales, first_row, ir.FloatType())
            added = address(context, builder, signature.args[7], bias, column, ir.FloatType())
            target = address(context, builder, signature.args[9], sums, integer(0), ir.FloatType())

            def finish(row: int, place: int, total: Any) -> None:
                scale = spread(builder, builder.load(builder.gep(scales, [integer(row)])), registers.lanes)
                biased = multiply_add(builder, total, scale, load_vector(builder, added, integer(place), floats))
                store_vector(builder, target, integer(row * PANEL + place), biased)

            def emit(count: int) -> None:
                width = registers.columns(count, PANEL)
                for own in range(0, PANEL, width):
                    emit_group_block(
                        builder,
                        form,
                        products,
                        registers,
                        count,
                        range(own, own + width),
                        rows,
                        num_groups,
                        panel,
                        finish,
                    )

            switch_rows(builder, num_rows, registers.max_rows, emit)
            return context.get_dummy_value()

        numbers = types.int64
        args = numbers, blocks, numbers, tiles, numbers, row_scales, numbers, bias, numbers, sums
        return types.void(*args), generate

    return multiply_block


@jit()
def look_up_group_columns(task: Any, part: Any, num_parts: Any) -> None:
    """indices (int64 [rows]), weights (packed), depth, out (bf16 [rows, depth]), the weights' form by its bits, scales
    of a group and minima (0 or 1), as in GroupForm, and whether numbers lie in pairs (0 or 1)"""
    indices, weights, depth, out = task[3], task[4], task[5], task[6]
    bits, num_scales, has_minima, in_pairs = task[7], task[8], task[9], task[10]
    columns = carray(integers_at(indices), (task[ROWS],))
    tile_bytes = PANEL * (4 * bits + 2 * num_scales + 2 * has_minima)
    first, end = share(task[ROWS], part, num_parts)
    for row in range(first, end):
        panel = weights + columns[row] // PANEL * (depth // GROUP) * tile_bytes
        target = carray(bf16_at(out + row * depth * 2), (depth,))
        for group in range(depth // GROUP):
            tile = panel + group * tile_bytes
            _take_group(tile, columns[row] % PANEL, bits, num_scales, has_minima, in_pairs, target, group * GROUP)


@jit()
def _take_group(
    tile: Any, column: Any, bits: Any, num_scales: Any, has_minima: Any, in_pairs: Any, out: Any, first: Any
) -> None:
    words, numbers = carray(words_at(tile), (bits * PANEL,)), carray(int8_at(tile), (4 * bits * PANEL,))
    halves = carray(bf16_at(tile + bits * PANEL * 4), ((num_scales + has_minima) * PANEL,))
    minimum = _float_of_half(halves[num_scales * PANEL + column]) if has_minima else np.float32(0)
    for place in range(GROUP):
        scale = _float_of_half(halves[place * num_scales // GROUP * PANEL + column])
        word = words[place * bits // 32 * PANEL + column]
        pair, is_second = place % (32 // bits) // 2, place % 2
        shifted = np.uint32(word >> np.uint32(16 * is_second + bits * pair))
        number = np.int32(shifted & np.uint32(15)) if bits == 4 else np.int32(np.int8(shifted & np.uint32(255)))
        if in_pairs:
            number = np.int32(numbers[2 * (place // 2 * PANEL + column) + is_second])
        out[first + place] = bf16_of_float(np.float32(number) * scale + minimum)


@jit(inline=True)
def _float_of_half(bits: Any) -> Any:
    """It converts as group_blocks.py does."""
    sign = np.uint32(np.uint32(bits & np.uint16(0x8000)) << np.uint32(16))
    moved = np.uint32(np.uint32(bits & np.uint16(0x7FFF)) << np.uint32(13))
    return float_of_bits(np.uint32(sign | moved)) * np.float32(2.0**112)
