"""Causal attention over the paged KV cache with AMX tiles: reads blocks where they lie, for prompts as for decoding.

A sequence's keys are taken 128 at a time, at fixed positions. Their blocks are packed into tiles once for all query
rows and heads: pairs of numbers that are multiplied together side by side. The query rows of all heads that share keys
are stacked, 16 to a tile. The softmax is computed on the go (Milakov & Gimelshein, arXiv:1805.02867): when a larger
score comes, what was summed so far is scaled down. A column of ones beside the values sums the weights.

A row's bits are a function of its query, its keys and its position: a tile's rows do not touch one another, keys come
in the same steps in the same order, and masked ones, and whole tiles of them, add zeros.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba.np.numpy_support import carray

from shard_server.engines.torch_engine.amx import (
    load_tile_configuration,
    prefetch,
    tile_dot,
    tile_load,
    tile_store,
    tile_zero,
    transpose_words,
)
from shard_server.engines.torch_engine.compiled import bf16_at, bytes_at, floats_at, jit, words_at
from shard_server.engines.torch_engine.lanes import copied, exp2, largest_between, paired, rounded, scaled, weigh

_CHUNK = 128
"""Keys that are packed, and weighed, at a time."""
TILE = 16
_TILE_WORDS = 256
_PAIR = 32
"""bf16 numbers in a tile's row: what one product sums over."""
PASS_DIM = 64
"""Columns of values for which there are registers."""
PIECE_TOKENS = 128
"""A prompt's rows are taken in pieces: their sums stay in the cache, and threads share them."""

_Array = np.ndarray[Any, Any]


class Shape(NamedTuple):
    block_size: int
    num_kv_heads: int
    group_size: int
    head_dim: int
    block_stride: int
    """Numbers from a block to the next; from a layer of a block to the next: block_size * token_size."""
    token_size: int


class Scratch(NamedTuple):
    """Of one thread; but for the ones and the configuration, which all threads read. Tiles lie one behind the other."""

    keys: _Array
    """uint32 [kv heads, keys / 16, head_dim / 32, 16 pairs of numbers, 16 keys]"""
    values: _Array
    """uint32 [kv heads, pairs of keys, head_dim]"""
    ones: _Array
    queries: _Array
    """uint16 [kv heads, rows, head_dim]"""
    sums: _Array
    """float32 [kv heads, rows, head_dim of weighted values and 16 times the sum of weights]"""
    tops: _Array
    """float32 [kv heads, rows]: the largest score yet"""
    scores: _Array
    """float32 [16, _CHUNK]"""
    weights: _Array
    """uint16 [16, _CHUNK]"""
    configuration: _Array


def new_ones() -> _Array:
    """Pairs of bf16 ones: a tile for `Scratch.ones`."""
    return np.full(_TILE_WORDS, 0x3F803F80, np.uint32)


@jit()
def _sizes(shape: Any) -> Any:
    """Words of keys, as many of values, and rows of queries"""
    rows = (PIECE_TOKENS * shape.group_size + TILE - 1) // TILE * TILE * shape.num_kv_heads
    return shape.num_kv_heads * _CHUNK * shape.head_dim // 2, rows


@jit()
def scratch_bytes(shape: Any) -> Any:
    """A multiple of 64, as are all its parts. They must be zeros at first: products read what was never written."""
    kv_words, rows = _sizes(shape)
    return 8 * kv_words + rows * (2 * shape.head_dim + 4 * (shape.head_dim + TILE) + 4) + 6 * TILE * _CHUNK


@jit()
def scratch_at(address: Any, ones: Any, configuration: Any, shape: Any) -> Any:
    """`address`, of `scratch_bytes`, `ones` and `configuration`: addresses"""
    kv_words, rows = _sizes(shape)
    dim = shape.head_dim
    values = address + 4 * kv_words
    queries = values + 4 * kv_words
    sums = queries + 2 * rows * dim
    tops = sums + 4 * rows * (dim + TILE)
    scores = tops + 4 * rows
    weights = scores + 4 * TILE * _CHUNK
    return Scratch(
        keys=carray(words_at(address), (kv_words,)),
        values=carray(words_at(values), (kv_words,)),
        ones=carray(words_at(ones), (_TILE_WORDS,)),
        queries=carray(bf16_at(queries), (rows * dim,)),
        sums=carray(floats_at(sums), (rows * (dim + TILE),)),
        tops=carray(floats_at(tops), (rows,)),
        scores=carray(floats_at(scores), (TILE * _CHUNK,)),
        weights=carray(bf16_at(weights), (TILE * _CHUNK,)),
        configuration=carray(bytes_at(configuration), (64,)),
    )


@jit()
def attend_pieces(
    pool: Any,
    words: Any,
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
    """`pool`: bf16 bits of the KV cache, and `words`: the same. `tables`: block tables, one behind the other.
    `pieces`: int64 [pieces * 4]: first row, rows, position of the first, where its table begins. `queries`: bf16 bits,
    rows `query_stride` apart; `out`: of `num_heads * head_dim` numbers each."""
    load_tile_configuration(scratch.configuration)
    layer_start = layer * shape.block_size * shape.token_size
    for piece in range(0, pieces.size, 4):
        first_row, num_rows = pieces[piece], pieces[piece + 1]
        position, first_table = pieces[piece + 2], pieces[piece + 3]
        _take_queries(queries, first_row, num_rows, query_stride, shape, scratch)
        num_keys = position + num_rows
        for chunk in range(max(0, position + 1 - window) // _CHUNK * _CHUNK, num_keys, _CHUNK):
            for key in range(chunk, min(chunk + _CHUNK, num_keys), TILE):
                block = first_table + key // shape.block_size
                start = tables[block] * shape.block_stride + layer_start + key % shape.block_size * shape.token_size
                following = start + TILE * shape.token_size
                if key % shape.block_size + TILE == shape.block_size and block + 1 < tables.size:
                    following = tables[block + 1] * shape.block_stride + layer_start
                _pack(pool, words, start, following, shape, scratch, key % _CHUNK)
            for head in range(shape.num_kv_heads):
                for row in range(0, num_rows * shape.group_size, TILE):
                    _attend_tile(head, row, num_rows, position, chunk, window, scale, shape, scratch)
        _give_out(out, first_row, num_rows, shape, scratch)


@jit(inline=True)
def _padded_rows(num_rows: Any, shape: Any) -> Any:
    return (num_rows * shape.group_size + TILE - 1) // TILE * TILE


@jit()
def _take_queries(queries: Any, first_row: Any, num_rows: Any, stride: Any, shape: Any, scratch: Any) -> None:
    """Rows of heads that share keys lie together: token by token, head by head."""
    dim, group = shape.head_dim, shape.group_size
    padded_rows = _padded_rows(num_rows, shape)
    for head in range(shape.num_kv_heads):
        for row in range(num_rows * group):
            target = (head * padded_rows + row) * dim
            source = (first_row + row // group) * stride + (head * group + row % group) * dim
            for words in range(0, dim, 2 * TILE):
                copied(queries, source + words, scratch.queries, target + words)
    _fill(scratch.tops[: shape.num_kv_heads * padded_rows], np.float32(-np.inf))
    _fill(scratch.sums[: shape.num_kv_heads * padded_rows * (dim + TILE)], np.float32(0))


@jit()
def _pack(pool: Any, words: Any, start: Any, following: Any, shape: Any, scratch: Any, key: Any) -> None:
    """16 keys and values of all heads; `key`: of the chunk. Meanwhile the 16 at `following` come nearer, bit by bit:
    all at once would be waited for."""
    dim, token_size = shape.head_dim, shape.token_size
    for head in range(shape.num_kv_heads):
        for pair in range(dim // _PAIR):
            source = start + head * dim + pair * _PAIR
            tile = (head * (_CHUNK // TILE) + key // TILE) * (dim // _PAIR) + pair
            transpose_words(words, source // 2, token_size // 2, scratch.keys, tile * _TILE_WORDS)
    for pair in range(TILE // 2):
        prefetch(pool, following + 2 * pair * token_size, 4 * token_size)
        for head in range(shape.num_kv_heads):
            even = start + 2 * pair * token_size + (shape.num_kv_heads + head) * dim
            odd = even + token_size
            target = (head * (_CHUNK // 2) + key // 2 + pair) * dim
            paired(pool, even, odd, dim, scratch.values, target)


@jit()
def _attend_tile(
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
    """Up to 16 rows of one head over one chunk."""
    dim, group = shape.head_dim, shape.group_size
    rows = min(TILE, num_rows * group - first_row)
    last_seen = position + (first_row + rows - 1) // group
    if last_seen < chunk or position + first_row // group - window >= chunk + _CHUNK - 1:
        return
    width = min(_CHUNK, (last_seen - chunk) // _PAIR * _PAIR + _PAIR)
    state = head * _padded_rows(num_rows, shape) + first_row
    _score(head, state * dim, width, dim, scratch)
    for row in range(rows):
        row_position = position + (first_row + row) // group
        seen_from = min(width, max(0, row_position + 1 - window - chunk))
        seen_to = max(0, min(width, row_position + 1 - chunk))
        scores = row * _CHUNK
        known = scratch.tops[state + row]
        top = max(known, largest_between(scratch.scores, scores, width, seen_from, seen_to))
        if top > known:
            scratch.tops[state + row] = top
            if known > -np.inf:
                factor = exp2(known * scale - top * scale)
                scaled(scratch.sums, (state + row) * (dim + TILE), dim + TILE, factor)
        weigh(scratch.scores, scores, width, seen_from, seen_to, scale, top * scale, scratch.weights, scores)
    _add_weighted_values(head, state, width, dim, scratch)


@jit()
def _score(head: Any, first_query: Any, width: Any, dim: Any, scratch: Any) -> None:
    """Products of 16 queries with `width` keys."""
    halves = dim // _PAIR
    for column in range(0, width, 2 * TILE):
        tile_zero(0)
        tile_zero(1)
        for half in range(halves):
            first_key = ((head * (_CHUNK // TILE) + column // TILE) * halves + half) * _TILE_WORDS
            tile_load(4, scratch.queries, first_query + half * _PAIR, dim * 2)
            tile_load(5, scratch.keys, first_key, 64)
            tile_dot(0, 4, 5)
            tile_load(6, scratch.keys, first_key + halves * _TILE_WORDS, 64)
            tile_dot(1, 4, 6)
        tile_store(0, scratch.scores, column, _CHUNK * 4)
        tile_store(1, scratch.scores, column + TILE, _CHUNK * 4)


@jit()
def _add_weighted_values(head: Any, state: Any, width: Any, dim: Any, scratch: Any) -> None:
    """`width` values by the weights of 16 rows, and the weights, to their sums."""
    line = dim + TILE
    sums = state * line
    for column in range(0, dim, PASS_DIM):
        tile_load(0, scratch.sums, sums + column, line * 4)
        tile_load(1, scratch.sums, sums + column + 16, line * 4)
        tile_load(2, scratch.sums, sums + column + 32, line * 4)
        tile_load(3, scratch.sums, sums + column + 48, line * 4)
        tile_load(7, scratch.sums, sums + dim, line * 4)
        for key in range(0, width, _PAIR):
            first = (head * (_CHUNK // 2) + key // 2) * dim + column
            tile_load(4, scratch.weights, key, _CHUNK * 2)
            tile_load(5, scratch.values, first, dim * 4)
            tile_dot(0, 4, 5)
            tile_load(6, scratch.values, first + 16, dim * 4)
            tile_dot(1, 4, 6)
            tile_load(5, scratch.values, first + 32, dim * 4)
            tile_dot(2, 4, 5)
            tile_load(6, scratch.values, first + 48, dim * 4)
            tile_dot(3, 4, 6)
            tile_load(5, scratch.ones, 0, 64)
            tile_dot(7, 4, 5)
        tile_store(0, scratch.sums, sums + column, line * 4)
        tile_store(1, scratch.sums, sums + column + 16, line * 4)
        tile_store(2, scratch.sums, sums + column + 32, line * 4)
        tile_store(3, scratch.sums, sums + column + 48, line * 4)
    tile_store(7, scratch.sums, sums + dim, line * 4)


@jit()
def _give_out(out: Any, first_row: Any, num_rows: Any, shape: Any, scratch: Any) -> None:
    dim, group = shape.head_dim, shape.group_size
    padded_rows, row_size = _padded_rows(num_rows, shape), shape.num_kv_heads * group * dim
    for head in range(shape.num_kv_heads):
        for row in range(num_rows * group):
            first = (head * padded_rows + row) * (dim + TILE)
            target = (first_row + row // group) * row_size + (head * group + row % group) * dim
            scaled(scratch.sums, first, dim, np.float32(1) / scratch.sums[first + dim])
            for number in range(0, dim, TILE):
                rounded(scratch.sums, first + number, out, target + number)


# Loops over slices, which begin at 0: only there does numba know that no index is negative, and LLVM makes vectors.


@jit()
def _fill(target: Any, value: Any) -> None:
    for index in range(target.size):
        target[index] = value
