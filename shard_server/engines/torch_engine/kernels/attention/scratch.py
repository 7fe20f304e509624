"""The working memory of a thread for attention."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba.np.numpy_support import carray

from shard_server.engines.torch_engine.kernels.codegen.compiled import bf16_at, bytes_at, floats_at, integers_at, jit

CHUNK = 128
"""The number of keys that are weighted at a time."""
TILE = 16
PIECE_TOKENS = 128
"""A prompt's rows are computed in pieces, so that their sums stay in the cache and threads can share the pieces."""

_Array = np.ndarray[Any, Any]


class AttentionShape(NamedTuple):
    """The sizes of a model's KV cache and heads, in numbers, for compiled code."""

    block_size: int
    num_kv_heads: int
    group_size: int
    head_dim: int
    block_stride: int
    """The numbers from one block to the next. From one layer of a block to the next there are block_size *
    token_size."""
    token_size: int


class AttentionScratch(NamedTuple):
    """The working memory of one thread."""

    queries: _Array
    """uint16 [kv heads, rows, head_dim]; or, in the same place, for kernels that compute in float32:"""
    wide_queries: _Array
    """float32 [kv heads, rows, head_dim], in blocks of rows; see vectors.py"""
    sums: _Array
    """float32 [kv heads, rows, head_dim] of weighted values"""
    tops: _Array
    """float32 [kv heads, rows]: the largest score so far"""
    totals: _Array
    """float32 [kv heads, rows]: the sum of weights"""
    scores: _Array
    """float32 [16, CHUNK]; kernels that compute in float32 replace them with the weights"""
    weights: _Array
    """uint16 [16, CHUNK]"""
    places: _Array
    """int64: where each 16 tokens of a chunk lie in the KV pool"""
    configuration: _Array


def _num_query_rows(shape: Any) -> Any:
    return (PIECE_TOKENS * shape.group_size + TILE - 1) // TILE * TILE * shape.num_kv_heads


_compiled_num_query_rows = jit()(_num_query_rows)


def scratch_bytes(shape: AttentionShape) -> int:
    """The size of a Scratch: a multiple of 64, as are all its parts. The memory must be zeros initially, because
    products also read parts that were never written. Python calls it: numba would compile it at every start."""
    return _num_query_rows(shape) * (8 * shape.head_dim + 8) + 6 * TILE * CHUNK + 8 * CHUNK // TILE + 64


@jit()
def scratch_at(address: Any, shape: Any) -> Any:
    rows, dim = _compiled_num_query_rows(shape), shape.head_dim
    sums = address + 4 * rows * dim
    tops = sums + 4 * rows * dim
    totals = tops + 4 * rows
    scores = totals + 4 * rows
    weights = scores + 4 * TILE * CHUNK
    places = weights + 2 * TILE * CHUNK
    return AttentionScratch(
        queries=carray(bf16_at(address), (rows * dim,)),
        wide_queries=carray(floats_at(address), (rows * dim,)),
        sums=carray(floats_at(sums), (rows * dim,)),
        tops=carray(floats_at(tops), (rows,)),
        totals=carray(floats_at(totals), (rows,)),
        scores=carray(floats_at(scores), (TILE * CHUNK,)),
        weights=carray(bf16_at(weights), (TILE * CHUNK,)),
        places=carray(integers_at(places), (CHUNK // TILE,)),
        configuration=carray(bytes_at(places + 8 * CHUNK // TILE), (64,)),
    )
