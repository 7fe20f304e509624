"""Causal attention over the block-based KV cache with AMX tiles: reads blocks in place, for prompts and for decoding.

Keys and values are stored in the pool in the layout of tiles (`store`): 16 tokens together, with pairs of numbers that
are multiplied together side by side. A sequence's keys are processed 128 at a time, at fixed positions. The query rows
of all heads that share keys are stacked, 16 to a tile. The softmax is computed online (Milakov & Gimelshein,
arXiv:1805.02867): when a larger score appears, the sums so far are scaled down.

A row's bits are a function of its query, its keys and its position: the rows of a tile do not affect one another, keys
come in the same steps in the same order, and masked keys, and whole tiles of them, add zeros.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shard_server.engines.torch_engine.kernels.amx import (
    load_tile_configuration,
    prefetch,
    tile_dot,
    tile_load,
    tile_store,
    tile_zero,
)
from shard_server.engines.torch_engine.kernels.attention_scratch import CHUNK, TILE
from shard_server.engines.torch_engine.kernels.compiled import jit
from shard_server.engines.torch_engine.kernels.simd_ops import copied, exp2, largest_between, rounded, scaled, weigh

_VALUE_TILE_NUMBERS = 256
"""The number of bf16 values in a tile: 8 pairs of 16 columns"""
_PAIR = 32
"""The number of bf16 in a tile's row, over which one product of queries and keys sums."""
PIECE_SIZE = 6
PASS_DIM = 64
"""The number of columns of values for which there are registers."""


@jit()
def store(tokens: Any, lane: Any, keys_and_values: Any) -> None:
    """Store one token's keys and values of all heads (bf16 [2 * kv_size]) as number `lane` of the 16 in `tokens`: keys
    [kv_size / 2 pairs, 16 tokens, 2], then values [kv_size / 16, 8 pairs of tokens, 16 columns, 2]."""
    kv_size = keys_and_values.size // 2
    for pair in range(kv_size // 2):
        target = (pair * TILE + lane) * 2
        tokens[target] = keys_and_values[2 * pair]
        tokens[target + 1] = keys_and_values[2 * pair + 1]
    first = TILE * kv_size + lane // 2 * _PAIR + lane % 2
    for column in range(kv_size):
        tokens[first + column // TILE * _VALUE_TILE_NUMBERS + column % TILE * 2] = keys_and_values[kv_size + column]


@jit()
def attend_pieces(
    pool: Any,
    layer: Any,
    tables: Any,
    pieces: Any,
    shape: Any,
    queries: Any,
    query_stride: Any,
    out: Any,
    window: Any,
    scale: Any,
    scratch: Any,
) -> None:
    """`pool`: bf16 bits of the KV cache. `tables`: the concatenated block tables. `pieces`: int64 [pieces *
    PIECE_SIZE]: first row, rows, position of the first, index of its table, first KV head and end. `queries`: bf16
    bits, rows `query_stride` apart; `out`: of `num_heads * head_dim` numbers each."""
    layer_start = layer * shape.block_size * shape.token_size
    configured_rows = 0
    for piece in range(0, pieces.size, PIECE_SIZE):
        first_row, num_rows = pieces[piece], pieces[piece + 1]
        position, table = pieces[piece + 2], pieces[piece + 3]
        first_head, end_head = pieces[piece + 4], pieces[piece + 5]
        rows = min(TILE, num_rows * shape.group_size)
        if rows != configured_rows:
            _configure(scratch.configuration, rows)
            load_tile_configuration(scratch.configuration)
            configured_rows = rows
        _take_queries(queries, first_row, num_rows, query_stride, first_head, end_head, shape, scratch)
        num_keys = position + num_rows
        for chunk in range(_first_chunk(position, window), num_keys, CHUNK):
            for key in range(chunk, min(chunk + CHUNK, num_keys), TILE):
                scratch.places[(key - chunk) // TILE] = _place(key, table, tables, layer_start, shape)
            # The next chunk is prefetched meanwhile in small parts: all at once would cause waiting.
            next_chunk, following = chunk + CHUNK, piece
            if next_chunk >= num_keys and piece + PIECE_SIZE < pieces.size:
                following += PIECE_SIZE
                next_chunk = _first_chunk(pieces[following + 2], window)
            for head in range(first_head, end_head):
                part, num_parts = head - first_head, end_head - first_head
                _prefetch(pool, pieces, following, next_chunk, part, num_parts, tables, layer_start, shape)
                for row in range(0, num_rows * shape.group_size, TILE):
                    _attend_tile(pool, head, row, num_rows, position, chunk, window, scale, shape, scratch)
        _give_out(out, first_row, num_rows, first_head, end_head, shape, scratch)


@jit()
def _configure(configuration: Any, rows: Any) -> None:
    """Registers 0 to 3 hold sums; 4 queries; 5 16 keys; 6 weights of 16 keys; 7 8 pairs of their values."""
    configuration[0] = 1
    for register in range(8):
        configuration[16 + 2 * register] = 32 if register == 6 else 64
        configuration[48 + register] = rows
    configuration[48 + 5], configuration[48 + 7] = TILE, TILE // 2


@jit(inline=True)
def _first_chunk(position: Any, window: Any) -> Any:
    return max(0, position + 1 - window) // CHUNK * CHUNK


@jit(inline=True)
def _place(key: Any, table: Any, tables: Any, layer_start: Any, shape: Any) -> Any:
    block, offset = tables[table + key // shape.block_size], key % shape.block_size
    return block * shape.block_stride + layer_start + offset * shape.token_size


@jit()
def _prefetch(
    pool: Any,
    pieces: Any,
    piece: Any,
    chunk: Any,
    part: Any,
    num_parts: Any,
    tables: Any,
    layer_start: Any,
    shape: Any,
) -> None:
    """Prefetch one of `num_parts` parts of the keys and values of a chunk that a piece sees."""
    num_keys, table = pieces[piece + 1] + pieces[piece + 2], pieces[piece + 3]
    first_head, num_heads = pieces[piece + 4], pieces[piece + 5] - pieces[piece + 4]
    size = TILE * shape.head_dim
    num_runs = (min(CHUNK, max(0, num_keys - chunk)) + TILE - 1) // TILE * 2  # of keys, and of values, of 16 tokens
    for run in range(num_runs * part // num_parts, num_runs * (part + 1) // num_parts):
        place = _place(chunk + run // 2 * TILE, table, tables, layer_start, shape)
        prefetch(pool, place + (run % 2 * shape.num_kv_heads + first_head) * size, num_heads * size * 2)


@jit(inline=True)
def _padded_rows(num_rows: Any, shape: Any) -> Any:
    return (num_rows * shape.group_size + TILE - 1) // TILE * TILE


@jit()
def _take_queries(
    queries: Any,
    first_row: Any,
    num_rows: Any,
    stride: Any,
    first_head: Any,
    end_head: Any,
    shape: Any,
    scratch: Any,
) -> None:
    """Gather queries so that rows of heads that share keys are adjacent: token by token, head by head."""
    dim, group = shape.head_dim, shape.group_size
    padded_rows = _padded_rows(num_rows, shape)
    for head in range(first_head, end_head):
        for row in range(num_rows * group):
            target = (head * padded_rows + row) * dim
            source = (first_row + row // group) * stride + (head * group + row % group) * dim
            for words in range(0, dim, 2 * TILE):
                copied(queries, source + words, scratch.queries, target + words)
    first, end = first_head * padded_rows, end_head * padded_rows
    _fill(scratch.tops[first:end], np.float32(-np.inf))
    _fill(scratch.totals[first:end], np.float32(0))
    _fill(scratch.sums[first * dim : end * dim], np.float32(0))


@jit()
def _attend_tile(
    pool: Any,
    head: Any,
    first_row: Any,
    num_rows: Any,
    position: Any,
    chunk: Any,
    window: Any,
    scale: Any,
    shape: Any,
    scratch: Any,
) -> None:
    """Attend with up to 16 rows of one head over one chunk."""
    dim, group = shape.head_dim, shape.group_size
    rows = min(TILE, num_rows * group - first_row)
    last_seen = position + (first_row + rows - 1) // group
    if last_seen < chunk or position + first_row // group - window >= chunk + CHUNK - 1:
        return
    width = min(CHUNK, (last_seen - chunk) // TILE * TILE + TILE)
    state = head * _padded_rows(num_rows, shape) + first_row
    _score(pool, head * TILE * dim, state * dim, width, dim, scratch)
    for row in range(rows):
        row_position = position + (first_row + row) // group
        seen_from = min(width, max(0, row_position + 1 - window - chunk))
        seen_to = max(0, min(width, row_position + 1 - chunk))
        scores = row * CHUNK
        known = scratch.tops[state + row]
        top = max(known, largest_between(scratch.scores, scores, width, seen_from, seen_to))
        total = scratch.totals[state + row]
        if top > known:
            scratch.tops[state + row] = top
            if known > -np.inf:
                factor = exp2(known * scale - top * scale)
                scaled(scratch.sums, (state + row) * dim, dim, factor)
                total *= factor
        weight = weigh(scratch.scores, scores, width, seen_from, seen_to, scale, top * scale, scratch.weights, scores)
        scratch.totals[state + row] = total + weight
    first_value = TILE * (shape.num_kv_heads + head) * dim
    _add_weighted_values(pool, first_value, state * dim, width, dim, scratch)


@jit()
def _score(pool: Any, first_key: Any, first_query: Any, width: Any, dim: Any, scratch: Any) -> None:
    """Multiply a tile of queries with `width` keys."""
    for column in range(0, width, TILE):
        key = scratch.places[column // TILE] + first_key
        tile_zero(0)
        for first in range(0, dim, _PAIR):
            tile_load(4, scratch.queries, first_query + first, dim * 2)
            tile_load(5, pool, key + first * TILE, 64)
            tile_dot(0, 4, 5)
        tile_store(0, scratch.scores, column, CHUNK * 4)


@jit()
def _add_weighted_values(pool: Any, first_value: Any, first_sum: Any, width: Any, dim: Any, scratch: Any) -> None:
    """Add `width` values, times the weights of a tile's rows, to the rows' sums."""
    for column in range(0, dim, PASS_DIM):
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
            tile_load(7, pool, value + _VALUE_TILE_NUMBERS, 64)
            tile_dot(1, 6, 7)
            tile_load(7, pool, value + 2 * _VALUE_TILE_NUMBERS, 64)
            tile_dot(2, 6, 7)
            tile_load(7, pool, value + 3 * _VALUE_TILE_NUMBERS, 64)
            tile_dot(3, 6, 7)
        tile_store(0, scratch.sums, sums, dim * 4)
        tile_store(1, scratch.sums, sums + 16, dim * 4)
        tile_store(2, scratch.sums, sums + 32, dim * 4)
        tile_store(3, scratch.sums, sums + 48, dim * 4)


@jit()
def _give_out(
    out: Any, first_row: Any, num_rows: Any, first_head: Any, end_head: Any, shape: Any, scratch: Any
) -> None:
    dim, group = shape.head_dim, shape.group_size
    padded_rows, row_size = _padded_rows(num_rows, shape), shape.num_kv_heads * group * dim
    for head in range(first_head, end_head):
        for row in range(num_rows * group):
            state = head * padded_rows + row
            target = (first_row + row // group) * row_size + (head * group + row % group) * dim
            scaled(scratch.sums, state * dim, dim, np.float32(1) / scratch.totals[state])
            for number in range(0, dim, TILE):
                rounded(scratch.sums, state * dim + number, out, target + number)


# Loops over slices, which begin at 0: only then does numba know that no index is negative, so that LLVM vectorises.


@jit()
def _fill(target: Any, value: Any) -> None:
    for index in range(target.size):
        target[index] = value
