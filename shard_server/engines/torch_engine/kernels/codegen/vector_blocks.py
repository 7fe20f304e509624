"""Products in vector registers: a block of rows times some columns, as LLVM code for any size of registers.

Each lane of a register sums one column of one row, in the order of the sum and with one rounding a step, whatever the
number of rows and of lanes. So a row's bits depend on nothing but the row, and are the same on CPUs with other
registers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final, Protocol

from llvmlite import ir
from numba.core import cgutils

from shard_server.engines.torch_engine.kernels.codegen.llvm import (
    call,
    constant,
    integer,
    multiply_add,
    prefetch_line,
    spread,
)

TILE: Final = 16
"""The number of columns, and of positions, in a tile of weights."""
_AHEAD: Final = 2**14
"""How many bytes weights are prefetched ahead of their use. CPUs recognise forward reads by themselves, but not as far
ahead as a core that multiplies several rows needs: a third of a decode step's time at batch 8 without."""
_I8, _I32, _FLOAT = ir.IntType(8), ir.IntType(32), ir.FloatType()


@dataclasses.dataclass(frozen=True, slots=True)
class Registers:
    """The vector registers of a CPU."""

    lanes: int
    """float32 in one of them"""
    number: int
    max_rows: int
    """The largest number of rows whose sums, for 16 columns or two registers, they hold beside what is multiplied."""

    def __str__(self) -> str:
        return f"{self.number}_of_{self.lanes}"

    @property
    def are_few(self) -> bool:
        """True when weights that wait to be widened would take the place of sums."""
        return self.number <= 16

    def columns(self, num_rows: int, widest: int) -> int:
        """How many columns of `num_rows` rows are summed at a time: at most `widest`."""
        columns = widest
        while columns > self.lanes and (num_rows + 1) * (columns // self.lanes) + 1 > self.number:
            columns //= 2
        return columns


class Weights(Protocol):
    """How the weights of a tile lie in memory, and how they are multiplied."""

    sums: ir.Type
    """The type of one sum"""
    factor: ir.Type
    """The type of a row's factor in memory"""
    num_positions: int
    """The number of vectors of one column that a tile holds"""
    num_factors: int
    """The number of a row's factors that belong to one position"""
    position_bytes: int
    """From one position to the next"""

    def load(self, builder: ir.IRBuilder, tile: Any, position: Any, column: int, lanes: int) -> list[Any]:
        """The vectors for `lanes` columns from `column` on at one position of the tile: `num_factors` of them."""
        ...

    def add(self, builder: ir.IRBuilder, weights: Any, factor: Any, sums: Any) -> Any:
        """sums + weights * factor"""
        ...

    def lines(self, columns: range) -> range:
        """The cache lines that `columns` begin at a tile's first position, as bytes from the tile's start. Those of
        another position are `position_bytes` further on for each."""
        ...


class _WordTiles:
    """Weights in words: tiles of [positions, 16 columns], of which each lies behind the one of the columns before."""

    num_factors = 1
    position_bytes = 4 * TILE

    def __init__(self, num_positions: int = TILE) -> None:
        self.num_positions = num_positions

    def load(self, builder: ir.IRBuilder, tile: Any, position: Any, column: int, lanes: int) -> list[Any]:
        row = builder.mul(position, integer(TILE))
        word = builder.add(row, integer(column // TILE * self.num_positions * TILE + column % TILE))
        pointer = builder.gep(builder.bitcast(tile, _I32.as_pointer()), [word])
        return [builder.load(builder.bitcast(pointer, ir.VectorType(_I32, lanes).as_pointer()), align=4)]

    def lines(self, columns: range) -> range:
        tile_bytes = self.num_positions * self.position_bytes
        return range(columns.start // TILE * tile_bytes, columns.stop // TILE * tile_bytes, tile_bytes)


class Bf16Pairs(_WordTiles):
    """Words of two bf16 weights, for two places of the sum. They are widened to float32 in registers."""

    sums: ir.Type = _FLOAT
    factor: ir.Type = _FLOAT
    num_factors = 2

    def load(self, builder: ir.IRBuilder, tile: Any, position: Any, column: int, lanes: int) -> list[Any]:
        [words] = super().load(builder, tile, position, column, lanes)
        floats = ir.VectorType(_FLOAT, lanes)
        lower = builder.shl(words, constant(words.type, 16))
        upper = builder.and_(words, constant(words.type, 0xFFFF0000))
        return [builder.bitcast(lower, floats), builder.bitcast(upper, floats)]

    def add(self, builder: ir.IRBuilder, weights: Any, factor: Any, sums: Any) -> Any:
        return multiply_add(builder, weights, factor, sums)


class Bf16Dots(_WordTiles):
    """The weights of `Bf16Pairs`, multiplied with pairs of bf16 by AVX-512 BF16. A pair's products are added one after
    the other; denormal numbers are zeros."""

    sums: ir.Type = _FLOAT
    factor: ir.Type = _I32

    def add(self, builder: ir.IRBuilder, weights: Any, factor: Any, sums: Any) -> Any:
        return call(builder, f"llvm.x86.avx512bf16.dpbf16ps.{32 * sums.type.count}", sums, factor, weights)


class Int8Dots(_WordTiles):
    """Words of four int8 weights, for four places of the sum, multiplied with words of four uint8 by AVX-512 VNNI:
    exactly, in int32."""

    sums: ir.Type = _I32
    factor: ir.Type = _I32

    def add(self, builder: ir.IRBuilder, weights: Any, factor: Any, sums: Any) -> Any:
        return call(builder, f"llvm.x86.avx512.vpdpbusd.{32 * sums.type.count}", sums, factor, weights)


class Int8Bytes:
    """int8 weights in the order of the sum: [positions, 32 columns]. They are widened to float32 in registers."""

    sums: ir.Type = _FLOAT
    factor: ir.Type = _FLOAT
    num_positions = TILE
    num_factors = 1
    position_bytes = 2 * TILE

    def load(self, builder: ir.IRBuilder, tile: Any, position: Any, column: int, lanes: int) -> list[Any]:
        byte = builder.add(builder.mul(position, integer(self.position_bytes)), integer(column))
        pointer = builder.gep(builder.bitcast(tile, _I8.as_pointer()), [byte])
        weights = builder.load(builder.bitcast(pointer, ir.VectorType(_I8, lanes).as_pointer()), align=1)
        whole = builder.sext(weights, ir.VectorType(_I32, lanes))
        return [builder.sitofp(whole, ir.VectorType(_FLOAT, lanes))]

    def lines(self, columns: range) -> range:
        return range(0 if columns.start else 1)  # a position's 32 columns are half a line

    def add(self, builder: ir.IRBuilder, weights: Any, factor: Any, sums: Any) -> Any:
        return multiply_add(builder, weights, factor, sums)


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """Where the factors of rows lie, in elements from one place of the sum to the next and from one row to the next.
    0 means that rows lie side by side, as many as there are."""

    step: int
    row_step: int


def emit_block(
    builder: ir.IRBuilder,
    weights: Weights,
    registers: Registers,
    num_rows: int,
    columns: range,
    rows: Rows,
    factors: Any,
    num_tiles: Any,
    tile_at: Callable[[Any], Any],
    initial: Callable[[int, int], Any],
    finish: Callable[[int, int, Any], None],
    *,
    is_streamed: bool = False,
) -> None:
    """Sum `columns` of `num_rows` rows.

    `factors` points to the first row's first factor. `tile_at` maps the number of a tile, of `num_tiles` (all int64),
    to a pointer to its bytes. `initial(row, column)` is a vector of sums at the start; `finish(row, column, sums)`
    stores them at the end. `is_streamed`: the weights come from memory, in the order of the tiles.
    """
    lanes, positions = registers.lanes, weights.num_positions
    starts = range(columns.start, columns.stop, lanes)
    sums_type = ir.VectorType(weights.sums, lanes)
    sums = {(row, column): cgutils.alloca_once(builder, sums_type) for row in range(num_rows) for column in starts}
    for (row, column), place in sums.items():
        builder.store(initial(row, column), place)
    step = rows.step or num_rows
    with cgutils.for_range_slice(builder, integer(0), num_tiles, integer(1)) as (number, _):
        tile = tile_at(number)
        with cgutils.for_range_slice(builder, integer(0), integer(positions), integer(1)) as (position, _):
            vectors = [weights.load(builder, tile, position, column, lanes) for column in starts]
            if is_streamed:
                for line in weights.lines(columns):
                    offset = builder.add(builder.mul(position, integer(weights.position_bytes)), integer(line + _AHEAD))
                    prefetch_line(builder, builder.gep(tile, [offset]))
            place = builder.add(builder.mul(number, integer(positions)), position)
            first = builder.mul(place, integer(weights.num_factors * step))
            for part in range(weights.num_factors):
                for row in range(num_rows):
                    index = builder.add(first, integer(part * step + row * rows.row_step))
                    factor = spread(builder, builder.load(builder.gep(factors, [index])), lanes)
                    for column, vector in zip(starts, vectors, strict=True):
                        own = sums[row, column]
                        builder.store(weights.add(builder, vector[part], factor, builder.load(own)), own)
    for (row, column), place in sums.items():
        finish(row, column, builder.load(place))


def switch_rows(builder: ir.IRBuilder, num_rows: Any, max_rows: int, emit: Callable[[int], None]) -> None:
    """Emit code for every number of rows (an int64) from 1 to `max_rows`, of which one is run."""
    end = builder.append_basic_block("rows_end")
    switch = builder.switch(num_rows, end)
    for rows in range(1, max_rows + 1):
        block = builder.append_basic_block(f"rows_{rows}")
        switch.add_case(integer(rows), block)
        builder.position_at_end(block)
        emit(rows)
        builder.branch(end)
    builder.position_at_end(end)


def nth_tile(builder: ir.IRBuilder, start: Any, num_bytes: int) -> Callable[[Any], Any]:
    """For tiles that follow one another: `tile_at` of `emit_block`. `start` points to bytes."""
    return lambda number: builder.gep(start, [builder.mul(number, integer(num_bytes))])
