"""Attention of prompts over KV blocks as one Triton kernel, for all prompts of a step together. Imported only if Triton
is installed, as segment_kernels.py is.

A program computes a piece of one prompt: neighbouring tokens, with all query heads that share keys, as the rows of
matrix products. It walks over the keys in tiles, reading blocks in place, with running maxima and sums (Dao,
FlashAttention-2, 2023). Nothing that is compiled depends on the number of prompts, their lengths, or on how much of
them was cached.
"""

# Triton compiles kernels from their source: no postponed annotations, and types that checkers cannot infer.
# ruff: noqa: N803
# pyrefly: ignore-errors

import torch
import triton
import triton.language as tl

_TILE_KEYS = 64
_NUM_WARPS = 8
_NUM_STAGES = 2
"""Tiles of keys and values in shared memory: more would not fit into that of smaller GPUs."""


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["tables", "pieces"])
def attend_piece(
    queries,
    pool,
    tables,
    pieces,
    out,
    query_stride,
    table_stride,
    block_stride,
    layer_offset,
    out_stride,
    kv_size,
    scale,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    piece = pieces + tl.program_id(0) * 4
    kv_head = tl.program_id(1)
    table = tables + tl.load(piece).to(tl.int64) * table_stride
    first_row = tl.load(piece + 1).to(tl.int64)
    num_tokens = tl.load(piece + 2)
    first_position = tl.load(piece + 3)
    rows = tl.arange(0, TOKENS * GROUP_PADDED)
    token = rows // GROUP_PADDED
    head = rows % GROUP_PADDED
    columns = tl.arange(0, HEAD_PADDED)
    is_column = (columns < HEAD_DIM)[None, :]
    is_number = ((token < num_tokens) & (head < GROUP))[:, None] & is_column
    column = ((kv_head * GROUP + head) * HEAD_DIM)[:, None] + columns[None, :]
    row = (first_row + token)[:, None]
    query = tl.load(queries + row * query_stride + column, mask=is_number, other=0.0)
    # Absent rows, which are not stored, see what the last one sees.
    position = first_position + tl.minimum(token, num_tokens - 1)
    end = first_position + num_tokens
    begin = tl.maximum(first_position - WINDOW + 1, 0) // TILE * TILE if WINDOW > 0 else 0
    maximum = tl.full([TOKENS * GROUP_PADDED], float("-inf"), tl.float32)
    weight = tl.zeros([TOKENS * GROUP_PADDED], tl.float32)
    total = tl.zeros([TOKENS * GROUP_PADDED, HEAD_PADDED], tl.float32)
    for start in range(begin, end, TILE):
        keys = start + tl.arange(0, TILE)
        exists = keys < end
        block = tl.load(table + keys // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
        place = block * block_stride + layer_offset + (keys % BLOCK_SIZE) * (2 * kv_size) + kv_head * HEAD_DIM
        places = place[:, None] + columns[None, :]
        mask = exists[:, None] & is_column
        key = tl.load(pool + places, mask=mask, other=0.0)
        value = tl.load(pool + places + kv_size, mask=mask, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
        seen = keys[None, :] <= position[:, None]
        if WINDOW > 0:
            seen = seen & (keys[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        # Until a key is seen the maximum is -inf, which must not be subtracted from itself.
        subtracted = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        share = tl.exp(scores - subtracted[:, None])
        shrink = tl.exp(maximum - subtracted)
        weight = weight * shrink + tl.sum(share, 1)
        total = total * shrink[:, None] + tl.dot(share.to(value.dtype), value, input_precision=PRECISION)
        maximum = new_maximum
    tl.store(out + row * out_stride + column, (total / weight[:, None]).to(out.dtype.element_ty), mask=is_number)


def attend_prompts(
    queries: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    tables: torch.Tensor,
    pieces: torch.Tensor,
    out: torch.Tensor,
    *,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    max_tokens: int,
    window: int | None,
) -> None:
    """`queries` [rows, heads * head_dim] (any row stride); `pool` [blocks, layers, block_size * 2 * kv_size]; `tables`
    and `pieces` as in attention.Prompts, pieces of at most `max_tokens`, a power of two. Writes the pieces' rows of
    `out` [rows, heads * head_dim]."""
    group = queries.shape[1] // head_dim // num_kv_heads
    attend_piece[(len(pieces), num_kv_heads)](
        queries,
        pool,
        tables,
        pieces,
        out,
        queries.stride(0),
        tables.stride(0),
        pool.stride(0),
        layer * pool.stride(1),
        out.stride(0),
        num_kv_heads * head_dim,
        head_dim**-0.5,
        WINDOW=window or 0,
        GROUP=group,
        GROUP_PADDED=triton.next_power_of_2(group),
        HEAD_DIM=head_dim,
        HEAD_PADDED=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_SIZE=block_size,
        TOKENS=max_tokens,
        TILE=_TILE_KEYS,
        PRECISION="ieee",
        num_warps=_NUM_WARPS,
        num_stages=_NUM_STAGES,
    )
