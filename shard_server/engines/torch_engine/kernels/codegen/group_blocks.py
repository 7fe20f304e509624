"""Products with grouped weights, as LLVM code for any size of registers.

A group is 32 places of the sum. Rows are int16, with one scale for all groups; weights are whole numbers with a scale
(and a minimum) for each column of a group. Within a group the products are summed as integers, exactly, so in any order
and by any instruction; groups are added one after the other in float32, each step with one rounding. So all CPUs with
fused multiply-add compute the same bits, whatever the number of rows and of lanes.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir
from numba.core import cgutils

from shard_server.engines.torch_engine.kernels.codegen.cpu import is_arm64
from shard_server.engines.torch_engine.kernels.codegen.llvm import (
    call,
    constant,
    integer,
    load_vector,
    multiply_add,
    prefetch_line,
    spread,
)
from shard_server.engines.torch_engine.kernels.codegen.vector_blocks import Registers

GROUP: Final = 32
"""The places of the sum in a group."""
PANEL: Final = 32
"""The columns of a tile."""
ROW_WORDS: Final = GROUP // 2 + 1
"""The words that a group of one row takes: pairs of int16, the float32 sum of the numbers."""
_AHEAD: Final = 2**14
"""Weights are prefetched so many bytes ahead, as in vector_blocks.py."""
_I8, _I16, _I32, _FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()
_Vectors = dict[tuple[int, int], Any]


class PairProducts(enum.Enum):
    """How pairs of int16 are multiplied and added to int32."""

    ACCUMULATED = "vpdpwssd"
    MULTIPLIED = "pmaddwd"
    """An addition follows."""
    PLAIN = "mul"
    """Number by number, in int32"""


def pair_products(registers: Registers) -> PairProducts:
    """The way of multiplying that all CPUs with these registers have."""
    if is_arm64():
        return PairProducts.PLAIN
    return PairProducts.MULTIPLIED


@dataclasses.dataclass(frozen=True, slots=True)
class GroupForm:
    """How the weights of a tile, a group of 32 columns, lie in memory: the columns' numbers, column by column, in words
    (see `words_of`) or, those of 8 bits where registers are few, in pairs; the columns' float16 scales; their float16
    minima, if there are any."""

    name: str
    bits: int
    """4: unsigned numbers; 8: signed ones"""
    num_scales: int = 1
    """1, or 2: one for each half of the group"""
    has_minima: bool = False

    @property
    def num_words(self) -> int:
        """The words that one column takes"""
        return self.bits

    @property
    def num_pairs(self) -> int:
        """The pairs of numbers in a word"""
        return 16 // self.bits

    @property
    def tile_bytes(self) -> int:
        return PANEL * (4 * self.num_words + 2 * self.num_scales + 2 * self.has_minima)

    def load(self, builder: ir.IRBuilder, registers: Registers, row: Any, column: int) -> list[Any]:
        """The vectors from which `pair` makes the pairs of a register's columns from `column` on; `row` points to the
        bytes of a word of each column."""
        lanes = registers.lanes
        if self.bits == 8 and registers.are_few:  # one instruction widens while it loads
            starts = [builder.gep(row, [integer(2 * (pair * PANEL + column))]) for pair in range(2)]
            pointers = [builder.bitcast(start, ir.VectorType(_I8, 2 * lanes).as_pointer()) for start in starts]
            return [
                builder.sext(builder.load(pointer, align=1), ir.VectorType(_I16, 2 * lanes)) for pointer in pointers
            ]
        pointer = builder.bitcast(row, _I32.as_pointer())
        return [load_vector(builder, pointer, integer(column), ir.VectorType(_I32, lanes))]

    def pair(self, builder: ir.IRBuilder, loaded: list[Any], pair: int) -> Any:
        """The pairs with the number `pair`, as int16 in words"""
        if len(loaded) > 1:
            half = loaded[pair]
            return builder.bitcast(half, ir.VectorType(_I32, half.type.count // 2))
        [words] = loaded
        if self.bits == 4:
            shifted = builder.lshr(words, constant(words.type, 4 * pair))
            return builder.and_(shifted, constant(words.type, 0x000F000F))
        halves = ir.VectorType(_I16, 2 * words.type.count)
        both, by = builder.bitcast(words, halves), constant(halves, 8)
        return builder.bitcast(builder.ashr(both if pair else builder.shl(both, by), by), words.type)


FORMS: Final = (
    GroupForm("q4", 4, has_minima=True),
    GroupForm("q8", 8),
    GroupForm("q8_16", 8, num_scales=2, has_minima=True),
)


def emit_group_block(
    builder: ir.IRBuilder,
    form: GroupForm,
    products: PairProducts,
    registers: Registers,
    num_rows: int,
    columns: range,
    rows: Any,
    num_groups: Any,
    panel: Any,
    finish: Callable[[int, int, Any], None],
) -> None:
    """Sum `columns` of `num_rows` rows.

    `rows` points to words: [groups, rows, ROW_WORDS]; `panel` to the bytes of the groups' tiles, one after the other.
    `finish(row, column, sums)` gets the sums of rows without their scales.
    """
    lanes = registers.lanes
    starts = range(columns.start, columns.stop, lanes)
    floats, words = ir.VectorType(_FLOAT, lanes), ir.VectorType(_I32, lanes)
    places = [(row, column) for row in range(num_rows) for column in starts]
    totals = {place: cgutils.alloca_once(builder, floats) for place in places}
    sums = {place: cgutils.alloca_once(builder, words) for place in places}
    for total in totals.values():
        builder.store(constant(floats, 0.0), total)
    scales_at = PANEL * 4 * form.num_words
    with cgutils.for_range_slice(builder, integer(0), num_groups, integer(1)) as (group, _):
        tile = builder.gep(panel, [builder.mul(group, integer(form.tile_bytes))])
        own = builder.gep(rows, [builder.mul(group, integer(num_rows * ROW_WORDS))])
        for line in range(scales_at, form.tile_bytes, 64):
            prefetch_line(builder, builder.gep(tile, [integer(line + _AHEAD)]))
        for part in range(form.num_scales):
            for place in sums.values():
                builder.store(constant(words, 0), place)
            first, end = (form.num_words * number // form.num_scales for number in (part, part + 1))
            _emit_sums(builder, form, products, registers, num_rows, starts, tile, own, range(first, end), sums)
            for column in starts:
                scale = _halves(builder, tile, scales_at + 2 * (part * PANEL + column), lanes)
                for row in range(num_rows):
                    number, total = builder.sitofp(builder.load(sums[row, column]), floats), totals[row, column]
                    builder.store(multiply_add(builder, number, scale, builder.load(total)), total)
        for column in starts if form.has_minima else ():
            minimum = _halves(builder, tile, scales_at + 2 * (PANEL * form.num_scales + column), lanes)
            for row in range(num_rows):
                place = builder.gep(own, [integer(row * ROW_WORDS + GROUP // 2)])
                row_sum, total = builder.bitcast(builder.load(place), _FLOAT), totals[row, column]
                added = multiply_add(builder, spread(builder, row_sum, lanes), minimum, builder.load(total))
                builder.store(added, total)
    for (row, column), total in totals.items():
        finish(row, column, builder.load(total))


def _emit_sums(
    builder: ir.IRBuilder,
    form: GroupForm,
    products: PairProducts,
    registers: Registers,
    num_rows: int,
    starts: range,
    tile: Any,
    own: Any,
    positions: range,
    sums: _Vectors,
) -> None:
    """Add the products of some of a group's words to `sums`."""
    with cgutils.for_range_slice(builder, integer(positions.start), integer(positions.stop), integer(1)) as (
        position,
        _,
    ):
        row_of_tile = builder.gep(tile, [builder.mul(position, integer(4 * PANEL))])
        loaded = {column: form.load(builder, registers, row_of_tile, column) for column in starts}

        # One row has many columns, whose pairs would take all of few registers at once: each is made when it is needed.
        is_late = num_rows == 1 and registers.are_few
        pairs = {
            column: [] if is_late else [form.pair(builder, vectors, pair) for pair in range(form.num_pairs)]
            for column, vectors in loaded.items()
        }
        for line in range(4 * starts.start, 4 * starts.stop, 64):
            prefetch_line(builder, builder.gep(row_of_tile, [integer(line + _AHEAD)]))
        first = builder.mul(position, integer(form.num_pairs))
        for pair in range(form.num_pairs):
            if is_late:
                pairs = {
                    column: [*pairs[column], form.pair(builder, vectors, pair)] for column, vectors in loaded.items()
                }
            for row in range(num_rows):
                index = builder.add(first, integer(row * ROW_WORDS + pair))
                numbers = spread(builder, builder.load(builder.gep(own, [index])), starts.step)
                for column in starts:
                    place = sums[row, column]
                    added = _add_pairs(builder, products, pairs[column][pair], numbers, builder.load(place))
                    builder.store(added, place)


def _add_pairs(builder: ir.IRBuilder, products: PairProducts, weights: Any, numbers: Any, sums: Any) -> Any:
    """sums + the products of both int16 of each word"""
    lanes = sums.type.count
    if products is PairProducts.ACCUMULATED:
        return call(builder, f"llvm.x86.avx512.vpdpwssd.{32 * lanes}", sums, weights, numbers)
    if products is PairProducts.MULTIPLIED:
        halves = ir.VectorType(_I16, 2 * lanes)
        name = {4: "llvm.x86.sse2.pmadd.wd", 8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}[lanes]
        function_type = ir.FunctionType(sums.type, [halves, halves])
        function = cgutils.get_or_insert_function(builder.module, function_type, name)
        both = [builder.bitcast(part, halves) for part in (weights, numbers)]
        return builder.add(sums, builder.call(function, both))
    by = constant(sums.type, 16)
    for halves in (
        [builder.ashr(part, by) for part in (weights, numbers)],
        [builder.ashr(builder.shl(part, by), by) for part in (weights, numbers)],
    ):
        sums = builder.add(sums, builder.mul(halves[0], halves[1]))
    return sums


def _halves(builder: ir.IRBuilder, tile: Any, byte: int, lanes: int) -> Any:
    """float32 of `lanes` float16 from `byte` of the tile on. Not all CPUs convert them: their bits are moved to where
    float32 has them, and multiplied by what the exponents then differ in."""
    halves, words = ir.VectorType(_I16, lanes), ir.VectorType(_I32, lanes)
    pointer = builder.bitcast(builder.gep(tile, [integer(byte)]), halves.as_pointer())
    bits = builder.sext(builder.load(pointer, align=2), words)
    moved = builder.and_(builder.shl(bits, constant(words, 13)), constant(words, 0x8FFFE000))
    floats = ir.VectorType(_FLOAT, lanes)
    return builder.fmul(builder.bitcast(moved, floats), constant(floats, 2.0**112))
