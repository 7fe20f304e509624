"""Attention over the block-based KV cache: reads blocks in place, for prompts, for decoding, and for whole texts each
of whose tokens sees all others.

Keys and values are stored in the pool in the order in which they are multiplied (`store`): 16 tokens together, with
pairs of numbers that are multiplied together side by side. A sequence's keys are processed 128 at a time, at fixed
positions. The query rows of all heads that share keys are stacked, 16 to a tile. The softmax is computed online
(Milakov & Gimelshein, arXiv:1805.02867): when a larger score appears, the sums so far are scaled down.

A row's bits are a function of its query, its keys and its position: the rows of a tile do not affect one another, keys
come in the same steps in the same order, and masked keys, and whole tiles of them, add zeros.

What multiplies is the CPU's matrix tiles (amx.py) or its vector registers (vectors.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba.np.numpy_support import carray

from shard_server.engines.torch_engine.kernels.attention.scratch import CHUNK, TILE, AttentionShape, scratch_at
from shard_server.engines.torch_engine.kernels.codegen.compiled import (
    bf16_at,
    float_of_bits,
    integers_at,
    jit,
    prefetch,
)
from shard_server.engines.torch_engine.kernels.codegen.tasks import ROWS
from shard_server.engines.torch_engine.kernels.codegen.vector_ops import largest_between, rounding_ops, scaled

VALUE_TILE_NUMBERS = 256
"""The number of bf16 values in a tile: 8 pairs of 16 columns"""
_PAIR = 32
"""The number of bf16 in 16 pairs of a tile."""
PIECE_SIZE = 7


class Multiplies(NamedTuple):
    """The compiled functions that multiply for `make_attend_pieces`."""

    name: str
    native_rounding: bool
    """See vector_ops.rounding_ops."""
    begin: Any
    """(scratch, rows): called before tiles of `rows` rows, if the number has changed"""
    take_query: Any
    """(queries, source, scratch, first, row, dim): copies the query at `queries[source ..]` as number `row` of those
    from scratch number `first` on"""
    score: Any
    """(pool, first_key, first_query, rows, width, dim, scratch): scratch.scores = queries times `width` keys"""
    weights: Any
    """(scratch): where the weights are stored that `add_values` multiplies with"""
    add_values: Any
    """(pool, first_value, first_sum, rows, width, dim, scratch): adds `width` values, times the weights of a tile's
    rows, to scratch.sums"""


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
        tokens[first + column // TILE * VALUE_TILE_NUMBERS + column % TILE * 2] = keys_and_values[kv_size + column]


def make_attend_pieces(multiplies: Multiplies) -> Any:
    """`attend_pieces` for one kind of CPU."""
    _, _, begin, take_query, score, weights, add_values = multiplies
    ops = rounding_ops(native=multiplies.native_rounding)
    rounded, weigh, exp2 = ops.rounded, ops.weigh, ops.exp2

    @jit(inline=True, variant=multiplies.name)
    def take_queries(
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
                source = (first_row + row // group) * stride + (head * group + row % group) * dim
                take_query(queries, source, scratch, head * padded_rows * dim, row, dim)
        first, end = first_head * padded_rows, end_head * padded_rows
        _fill(scratch.tops[first:end], np.float32(-np.inf))
        _fill(scratch.totals[first:end], np.float32(0))
        _fill(scratch.sums[first * dim : end * dim], np.float32(0))

    @jit(variant=multiplies.name)
    def attend_tile(
        pool: Any,
        head: Any,
        first_row: Any,
        num_rows: Any,
        position: Any,
        step: Any,
        chunk: Any,
        window: Any,
        scale: Any,
        shape: Any,
        scratch: Any,
    ) -> None:
        """Attend with up to 16 rows of one head over one chunk. `step`: what each row sees more than the one before."""
        dim, group = shape.head_dim, shape.group_size
        rows = min(TILE, num_rows * group - first_row)
        last_seen = position + step * ((first_row + rows - 1) // group)
        if last_seen < chunk or position + step * (first_row // group) - window >= chunk + CHUNK - 1:
            return
        width = min(CHUNK, (last_seen - chunk) // TILE * TILE + TILE)
        state = head * _padded_rows(num_rows, shape) + first_row
        score(pool, head * TILE * dim, state * dim, rows, width, dim, scratch)
        for row in range(rows):
            row_position = position + step * ((first_row + row) // group)
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
            weight = weigh(
                scratch.scores, scores, width, seen_from, seen_to, scale, top * scale, weights(scratch), scores
            )
            scratch.totals[state + row] = total + weight
        first_value = TILE * (shape.num_kv_heads + head) * dim
        add_values(pool, first_value, state * dim, rows, width, dim, scratch)

    @jit(inline=True, variant=multiplies.name)
    def give_out(
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

    @jit(inline=True, variant=multiplies.name)
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
        PIECE_SIZE]: first row, rows, position of the first, index of its table, first KV head and end, the step from
        the position of a row to that of the next one: 1, or 0 where all rows see all keys. `queries`: bf16 bits, rows
        `query_stride` apart; `out`: of `num_heads * head_dim` numbers each."""
        layer_start = layer * shape.block_size * shape.token_size
        configured_rows = 0
        for piece in range(0, pieces.size, PIECE_SIZE):
            first_row, num_rows = pieces[piece], pieces[piece + 1]
            position, table = pieces[piece + 2], pieces[piece + 3]
            first_head, end_head, step = pieces[piece + 4], pieces[piece + 5], pieces[piece + 6]
            rows = min(TILE, num_rows * shape.group_size)
            if rows != configured_rows:
                begin(scratch, rows)
                configured_rows = rows
            take_queries(queries, first_row, num_rows, query_stride, first_head, end_head, shape, scratch)
            num_keys = position + 1 + step * (num_rows - 1)
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
                        attend_tile(pool, head, row, num_rows, position, step, chunk, window, scale, shape, scratch)
            give_out(out, first_row, num_rows, first_head, end_head, shape, scratch)

    return attend_pieces


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
    num_keys = pieces[piece + 2] + 1 + pieces[piece + 6] * (pieces[piece + 1] - 1)
    table = pieces[piece + 3]
    first_head, num_heads = pieces[piece + 4], pieces[piece + 5] - pieces[piece + 4]
    size = TILE * shape.head_dim
    num_runs = (min(CHUNK, max(0, num_keys - chunk)) + TILE - 1) // TILE * 2  # of keys, and of values, of 16 tokens
    for run in range(num_runs * part // num_parts, num_runs * (part + 1) // num_parts):
        place = _place(chunk + run // 2 * TILE, table, tables, layer_start, shape)
        prefetch(pool, place + (run % 2 * shape.num_kv_heads + first_head) * size, num_heads * size * 2)


@jit(inline=True)
def _padded_rows(num_rows: Any, shape: Any) -> Any:
    return (num_rows * shape.group_size + TILE - 1) // TILE * TILE


# Loops over slices, which begin at 0: only then does numba know that no index is negative, so that LLVM vectorises.


@jit()
def _fill(target: Any, value: Any) -> None:
    for index in range(target.size):
        target[index] = value


def make_attend_rows(multiplies: Multiplies) -> Any:
    """`attend_rows` for one kind of CPU."""
    attend_pieces = make_attend_pieces(multiplies)

    @jit(variant=multiplies.name)
    def attend_rows(task: Any, part: Any, num_parts: Any) -> None:
        """plan (see CompiledPlan.words), queries (bf16, rows `stride` apart), stride, out (bf16 [rows, query_size]),
        layer, window, constants (see CompiledAttention)"""
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

    return attend_rows
