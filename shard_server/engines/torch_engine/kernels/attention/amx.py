"""Attention's products on AMX tiles: weights are rounded to bf16, sums are float32."""

from __future__ import annotations

from typing import Any

from shard_server.engines.torch_engine.kernels.attention.attend import VALUE_TILE_NUMBERS, Multiplies
from shard_server.engines.torch_engine.kernels.attention.scratch import CHUNK, TILE
from shard_server.engines.torch_engine.kernels.codegen.amx import (
    load_tile_configuration,
    tile_dot,
    tile_load,
    tile_store,
    tile_zero,
)
from shard_server.engines.torch_engine.kernels.codegen.compiled import jit
from shard_server.engines.torch_engine.kernels.codegen.vector_ops import copied

_PAIR = 32
"""The number of bf16 in a tile's row, over which one product of queries and keys sums."""
PASS_DIM = 64
"""The number of columns of values for which there are registers."""


@jit()
def _begin(scratch: Any, rows: Any) -> None:
    """Registers 0 to 3 hold sums; 4 queries; 5 16 keys; 6 weights of 16 keys; 7 8 pairs of their values."""
    configuration = scratch.configuration
    configuration[0] = 1
    for register in range(8):
        configuration[16 + 2 * register] = 32 if register == 6 else 64
        configuration[48 + register] = rows
    configuration[48 + 5], configuration[48 + 7] = TILE, TILE // 2
    load_tile_configuration(configuration)


@jit()
def _take_query(queries: Any, source: Any, scratch: Any, first: Any, row: Any, dim: Any) -> None:
    for words in range(0, dim, 2 * TILE):
        copied(queries, source + words, scratch.queries, first + row * dim + words)


@jit()
def _score(pool: Any, first_key: Any, first_query: Any, _rows: Any, width: Any, dim: Any, scratch: Any) -> None:
    """Multiply a tile of queries with `width` keys."""
    for column in range(0, width, TILE):
        key = scratch.places[column // TILE] + first_key
        tile_zero(0)
        for first in range(0, dim, _PAIR):
            tile_load(4, scratch.queries, first_query + first, dim * 2)
            tile_load(5, pool, key + first * TILE, 64)
            tile_dot(0, 4, 5)
        tile_store(0, scratch.scores, column, CHUNK * 4)


@jit(inline=True)
def _weights(scratch: Any) -> Any:
    return scratch.weights


@jit()
def _add_half_pass(pool: Any, first_value: Any, sums: Any, width: Any, dim: Any, scratch: Any) -> None:
    """The same for the 32 columns that are left of heads of 32, 96, ... numbers."""
    tile_load(0, scratch.sums, sums, dim * 4)
    tile_load(1, scratch.sums, sums + 16, dim * 4)
    for key in range(0, width, TILE):
        value = scratch.places[key // TILE] + first_value
        tile_load(6, scratch.weights, key, CHUNK * 2)
        tile_load(7, pool, value, 64)
        tile_dot(0, 6, 7)
        tile_load(7, pool, value + VALUE_TILE_NUMBERS, 64)
        tile_dot(1, 6, 7)
    tile_store(0, scratch.sums, sums, dim * 4)
    tile_store(1, scratch.sums, sums + 16, dim * 4)


@jit()
def _add_values(pool: Any, first_value: Any, first_sum: Any, _rows: Any, width: Any, dim: Any, scratch: Any) -> None:
    """Add `width` values, times the weights of a tile's rows, to the rows' sums."""
    whole = dim // PASS_DIM * PASS_DIM
    if whole < dim:
        _add_half_pass(pool, first_value + whole * TILE, first_sum + whole, width, dim, scratch)
    for column in range(0, whole, PASS_DIM):
        sums = first_sum + column
        tile_load(0, scratch.sums, sums, dim * 4)
        tile_load(1, scratch.sums, sums + 16, dim * 4)
        tile_load(2, scratch.sums, sums + 32, dim * 4)
        tile_load(3, scratch.sums, sums + 48, dim * 4)
        for key in range(0, width, TILE):
            value = scratch.places[key // TILE] + first_value + column * TILE
            tile_load(6, scratch.weights, key, CHUNK * 2)
            tile_load(7, pool, value, 64)
            tile_dot(0, 6, 7)
            tile_load(7, pool, value + VALUE_TILE_NUMBERS, 64)
            tile_dot(1, 6, 7)
            tile_load(7, pool, value + 2 * VALUE_TILE_NUMBERS, 64)
            tile_dot(2, 6, 7)
            tile_load(7, pool, value + 3 * VALUE_TILE_NUMBERS, 64)
            tile_dot(3, 6, 7)
        tile_store(0, scratch.sums, sums, dim * 4)
        tile_store(1, scratch.sums, sums + 16, dim * 4)
        tile_store(2, scratch.sums, sums + 32, dim * 4)
        tile_store(3, scratch.sums, sums + 48, dim * 4)


AMX = Multiplies(
    name="amx",
    native_rounding=True,
    begin=_begin,
    take_query=_take_query,
    score=_score,
    weights=_weights,
    add_values=_add_values,
)
