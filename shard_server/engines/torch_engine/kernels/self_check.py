"""Compares a family's compiled kernels with float64, on random data, before an engine relies on them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from shard_server.engines.torch_engine.config import AttentionConfig
from shard_server.engines.torch_engine.grouped_weight import quantised
from shard_server.engines.torch_engine.kernels.packed_groups import PackedGroups
from shard_server.engines.torch_engine.kernels.packed_linear import PackedLinears, multiply
from shard_server.engines.torch_engine.kernels.packed_weights import PackedBf16, PackedInt8
from shard_server.engines.torch_engine.kernels.paged_attention import CompiledAttention
from shard_server.engines.torch_engine.kernels.products.outputs import FLOATS
from shard_server.engines.torch_engine.kernels.thread_pool import ThreadPool
from shard_server.engines.torch_engine.kv_cache import KvCache
from shard_server.engines.torch_engine.operators.attention import Extent
from shard_server.engines.torch_engine.operators.int8_linear import quantise_rows
from shard_server.engines.torch_engine.operators.linear import row_granularity

_Pack = type[PackedBf16 | PackedInt8 | PackedGroups]
_ROW_COUNTS = (1, 3, 29)
_DEPTH, _COLUMNS = 192, 80
_PRODUCT_LOSS = 1e-4
"""The share of the sum of the products' magnitudes that may be lost: rows of int8 digits lose 2**-15."""
_ATTENTION_LOSS = 0.02
_NUM_TOKENS, _BLOCK_SIZE = 200, 16


def why_wrong(threads: ThreadPool, config: AttentionConfig) -> str | None:
    """Says which of the family's results differ from float64 by more than they may; None if none. Attention is that of
    the model's heads."""
    generator = torch.Generator().manual_seed(0)
    packs: tuple[tuple[str, _Pack], ...] = (("bf16", PackedBf16), ("int8", PackedInt8), ("packed", PackedGroups))
    for name, pack in packs:
        if not _multiplies(threads, pack, generator):
            return f"its {name} products are wrong"
    return None if _attends(threads, config, generator) else "its attention is wrong"


def rows_are_independent(threads: ThreadPool, depths: Iterable[int]) -> bool:
    """Returns True when a row of a product has the same bits in whatever batch it is computed: measured, for sums of
    these lengths. Columns are computed alike, so a few of them suffice."""
    generator = torch.Generator().manual_seed(0)
    for pack in (PackedBf16, PackedInt8):
        linears = PackedLinears(pack, threads)
        for depth in depths:
            weight = torch.randn(_COLUMNS, depth, generator=generator).bfloat16()
            if row_granularity(linears.linear(weight, None), torch.bfloat16) != 1:
                return False
    return True


def _multiplies(threads: ThreadPool, pack: _Pack, generator: torch.Generator) -> bool:
    weight: Any = torch.randn(_COLUMNS, _DEPTH, generator=generator).bfloat16()
    exact = weight.double()
    if pack is PackedInt8:
        values, scales = quantise_rows(weight)
        exact = values.double() * scales.double()
    if pack is PackedGroups:
        weight = quantised(weight, 8)
        exact = weight.expanded().double()
    weights = pack(weight, None, threads)
    for num_rows in _ROW_COUNTS:
        x = torch.randn(num_rows, _DEPTH, generator=generator).bfloat16()
        out = multiply(threads, weights, x, FLOATS, torch.empty(num_rows, weights.num_columns))[:, :_COLUMNS]
        allowed = _PRODUCT_LOSS * (x.double().abs() @ exact.abs().T)
        # Not the opposite comparison: a NaN is wrong.
        if not bool(((out.double() - x.double() @ exact.T).abs() <= allowed).all()):
            return False
    return True


def _attends(threads: ThreadPool, config: AttentionConfig, generator: torch.Generator) -> bool:
    config = config.one_layer
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    num_blocks = -(-_NUM_TOKENS // _BLOCK_SIZE)
    cache = KvCache(config, num_blocks=num_blocks, block_size=_BLOCK_SIZE, dtype=torch.bfloat16)
    attention = CompiledAttention(config, cache, threads)
    keys_and_values = torch.randn(_NUM_TOKENS, 2 * config.kv_size, generator=generator).bfloat16()
    queries = torch.randn(_NUM_TOKENS, config.query_size, generator=generator).bfloat16()
    attention.write(0, range(_NUM_TOKENS), keys_and_values)
    table = list(range(num_blocks))
    plan = attention.plan([], [Extent(first_row=0, num_new=_NUM_TOKENS, num_past=0, block_table=table)])
    rows = attention.attend(plan, 0, queries).double().view(_NUM_TOKENS, heads, head_dim)
    keys, values = keys_and_values.double().view(_NUM_TOKENS, 2, kv_heads, head_dim).unbind(1)
    keys, values = (part.repeat_interleave(config.num_heads_per_kv_head, 1) for part in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries.double().view(_NUM_TOKENS, heads, head_dim), keys)
    is_hidden = torch.ones(_NUM_TOKENS, _NUM_TOKENS, dtype=torch.bool).triu(1)
    weights = (scores * head_dim**-0.5).masked_fill(is_hidden, -torch.inf).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", weights, values)
    return bool(((rows - expected).abs() <= _ATTENTION_LOSS * expected.abs().clamp_min(1)).all())
