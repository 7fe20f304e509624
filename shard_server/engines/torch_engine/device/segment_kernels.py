"""Attention of single rows over KV blocks as two Triton kernels. Imported only if Triton is installed (torch's CUDA
builds bring it; TRITON_INTERPRET=1 runs the kernels on a CPU).

A row's keys are processed in segments of SEGMENT_KEYS, counted from the first token of its sequence, so that one row
alone keeps a GPU busy; then its segments are merged in order (Dao et al., Flash-Decoding, 2023). A row's result depends
on its own keys only, not on how many rows there are or how they were scheduled.
"""

# Triton compiles kernels from their source: no postponed annotations, and types that checkers cannot infer.
# ruff: noqa: N803
# pyrefly: ignore-errors

import torch
import triton
import triton.language as tl

SEGMENT_KEYS = 256
_TILE_KEYS = 64
_MIN_DOT_ROWS = 16
"""The number of rows of a product on tensor cores; the heads that share keys are its rows."""


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["tables", "lengths"])
def attend_segment(
    queries,
    pool,
    tables,
    lengths,
    sums,
    maxima,
    weights,
    query_stride,
    table_stride,
    block_stride,
    layer_offset,
    num_segments,
    kv_size,
    scale,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SEGMENT: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    segment = tl.program_id(2)
    length = tl.load(lengths + row)
    begin = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    first = segment * SEGMENT
    end = tl.minimum(first + SEGMENT, length)
    if (first < length) & (end > begin):
        heads = tl.arange(0, GROUP_PADDED)
        columns = tl.arange(0, HEAD_PADDED)
        is_head = (heads < GROUP)[:, None]
        is_column = (columns < HEAD_DIM)[None, :]
        query_places = row * query_stride + ((kv_head * GROUP + heads) * HEAD_DIM)[:, None] + columns[None, :]
        query = tl.load(queries + query_places, mask=is_head & is_column, other=0.0)
        maximum = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
        weight = tl.zeros([GROUP_PADDED], tl.float32)
        total = tl.zeros([GROUP_PADDED, HEAD_PADDED], tl.float32)
        for start in range(first, end, TILE):
            keys = start + tl.arange(0, TILE)
            seen = (keys >= begin) & (keys < end)
            block = tl.load(tables + row * table_stride + keys // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
            token = block * block_stride + layer_offset + (keys % BLOCK_SIZE) * (2 * kv_size) + kv_head * HEAD_DIM
            places = token[:, None] + columns[None, :]
            mask = seen[:, None] & is_column
            key = tl.load(pool + places, mask=mask, other=0.0)
            value = tl.load(pool + places + kv_size, mask=mask, other=0.0)
            scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
            scores = tl.where(seen[None, :], scores, float("-inf"))
            new_maximum = tl.maximum(maximum, tl.max(scores, 1))
            # Until a key is seen the maximum is -inf, which must not be subtracted from itself.
            subtracted = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            share = tl.exp(scores - subtracted[:, None])
            shrink = tl.exp(maximum - subtracted)
            weight = weight * shrink + tl.sum(share, 1)
            total = total * shrink[:, None] + tl.dot(share.to(value.dtype), value, input_precision=PRECISION)
            maximum = new_maximum
        part = (row * tl.num_programs(1) * GROUP + kv_head * GROUP + heads) * num_segments + segment
        tl.store(maxima + part, maximum, mask=heads < GROUP)
        tl.store(weights + part, weight, mask=heads < GROUP)
        tl.store(sums + part[:, None] * HEAD_DIM + columns[None, :], total, mask=is_head & is_column)


@triton.jit(do_not_specialize_on_alignment=["lengths"])
def merge_segments(
    sums,
    maxima,
    weights,
    lengths,
    out,
    num_segments,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = row * tl.num_programs(1) + tl.program_id(1)
    length = tl.load(lengths + row)
    begin = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    columns = tl.arange(0, HEAD_PADDED)
    is_column = columns < HEAD_DIM
    maximum = float("-inf")
    weight = 0.0
    total = tl.zeros([HEAD_PADDED], tl.float32)
    # The first segment that is seen, and every one behind it, has a key in it.
    for segment in range(begin // SEGMENT, tl.cdiv(length, SEGMENT)):
        part = head * num_segments + segment
        own_maximum = tl.load(maxima + part)
        new_maximum = tl.maximum(maximum, own_maximum)
        shrink = tl.exp(maximum - new_maximum)
        share = tl.exp(own_maximum - new_maximum)
        own_total = tl.load(sums + part * HEAD_DIM + columns, mask=is_column, other=0.0)
        total = total * shrink + own_total * share
        weight = weight * shrink + tl.load(weights + part) * share
        maximum = new_maximum
    tl.store(out + head * HEAD_DIM + columns, (total / weight).to(out.dtype.element_ty), mask=is_column)


class SegmentScratch:
    """Partial results of up to `max_rows` rows over up to `max_keys` keys."""

    def __init__(self, max_rows: int, num_heads: int, head_dim: int, max_keys: int, device: torch.device) -> None:
        self.max_rows = max_rows
        self.num_segments = -(-max_keys // SEGMENT_KEYS)
        parts = (max_rows, num_heads, self.num_segments)
        self.sums = torch.empty(*parts, head_dim, dtype=torch.float32, device=device)
        self.maxima = torch.empty(parts, dtype=torch.float32, device=device)
        self.weights = torch.empty(parts, dtype=torch.float32, device=device)


def attend_rows(
    queries: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    scratch: SegmentScratch,
    *,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int | None,
) -> None:
    """`queries` [rows, heads * head_dim] (any row stride), at most scratch.max_rows; `pool` [blocks, layers,
    block_size * 2 * kv_size]; `tables` int32 [rows, blocks]; `lengths` int32 [rows], at least 1: keys of each row, its
    own included. Writes `out` [rows, heads * head_dim], contiguous."""
    num_rows = queries.shape[0]
    group = queries.shape[1] // head_dim // num_kv_heads
    num_segments = min(scratch.num_segments, -(-tables.shape[1] * block_size // SEGMENT_KEYS))
    head_padded = max(16, triton.next_power_of_2(head_dim))
    window_size = window or 0
    attend_segment[(num_rows, num_kv_heads, num_segments)](
        queries,
        pool,
        tables,
        lengths,
        scratch.sums,
        scratch.maxima,
        scratch.weights,
        queries.stride(0),
        tables.stride(0),
        pool.stride(0),
        layer * pool.stride(1),
        scratch.num_segments,
        num_kv_heads * head_dim,
        head_dim**-0.5,
        WINDOW=window_size,
        GROUP=group,
        GROUP_PADDED=max(_MIN_DOT_ROWS, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim,
        HEAD_PADDED=head_padded,
        BLOCK_SIZE=block_size,
        SEGMENT=SEGMENT_KEYS,
        TILE=_TILE_KEYS,
        PRECISION="ieee",
    )
    merge_segments[(num_rows, num_kv_heads * group)](
        scratch.sums,
        scratch.maxima,
        scratch.weights,
        lengths,
        out,
        scratch.num_segments,
        WINDOW=window_size,
        HEAD_DIM=head_dim,
        HEAD_PADDED=head_padded,
        SEGMENT=SEGMENT_KEYS,
    )
