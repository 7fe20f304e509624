"""Attention over the block-based KV cache on an accelerator, in fixed shapes, so that a decode step can be recorded
once.

Single rows (decoding, and every row where results must not depend on the batch) go through one of two kernels of the
same meaning: Triton's (segment_kernels.py), which is what runs on a GPU, and a plain one that gathers, which says what
is meant and runs anywhere. Prompts go through torch's attention over what was gathered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812

from shard_server.engines.base import EngineError
from shard_server.engines.torch_engine.config import LlamaConfig
from shard_server.engines.torch_engine.kv_cache import KvCache
from shard_server.engines.torch_engine.operators.attention import Extent

_MAX_KERNEL_ROWS = 256
"""The number of rows for which there is room for partial results at a time."""

AttendRows = Callable[[torch.Tensor, int, torch.Tensor, torch.Tensor, int | None], torch.Tensor]
"""(queries [rows, heads * head_dim], layer, tables int32 [rows, blocks], lengths int32 [rows], window) → [rows, heads *
head_dim]. A row sees so many keys of its table, or the last `window` of them."""


@dataclasses.dataclass(slots=True)
class Prompt:
    """Rows of one sequence that attend together."""

    extent: Extent
    block_rows: torch.Tensor
    """int64 [layers, blocks]"""


@dataclasses.dataclass(slots=True)
class DevicePlan:
    """The plan of every layer in one step."""

    token_rows: torch.Tensor
    """int64 [layers, tokens]: where the KV of each token is stored."""
    tables: torch.Tensor
    """int32 [rows, blocks]: the block tables of the rows that attend individually; they come first."""
    lengths: torch.Tensor
    """int32 [rows]"""
    prompts: Sequence[Prompt] = ()


class DeviceAttention:
    """Attention of one model over one KV cache."""

    def __init__(self, config: LlamaConfig, cache: KvCache, attend_rows: AttendRows) -> None:
        self._config = config
        self._cache = cache
        self._attend_rows = attend_rows

    def prompt(self, extent: Extent) -> Prompt:
        num_blocks = -(-extent.num_tokens // self._cache.block_size)
        return Prompt(extent, self._cache.block_rows(extent.block_table[:num_blocks]))

    def attend(self, plan: DevicePlan, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """`queries` [rows, heads * head_dim] (any row stride) → the same shape. The KV must be stored already."""
        window = self._config.layer_windows[layer]
        num_single = plan.tables.shape[0]
        if num_single == queries.shape[0]:
            return self._attend_rows(queries, layer, plan.tables, plan.lengths, window)
        out = torch.zeros(queries.shape, dtype=queries.dtype, device=queries.device)
        if num_single:
            out[:num_single] = self._attend_rows(queries[:num_single], layer, plan.tables, plan.lengths, window)
        for prompt in plan.prompts:
            rows = slice(prompt.extent.first_row, prompt.extent.first_row + prompt.extent.num_new)
            out[rows] = self._attend_prompt(prompt, layer, queries[rows], window)
        return out

    def _attend_prompt(self, prompt: Prompt, layer: int, queries: torch.Tensor, window: int | None) -> torch.Tensor:
        num_new, num_tokens = prompt.extent.num_new, prompt.extent.num_tokens
        keys, values = gathered_keys_and_values(self._cache, prompt.block_rows[layer], 1)
        keys, values = keys[:, :, :num_tokens], values[:, :, :num_tokens]
        heads = queries.view(1, num_new, -1, self._config.head_dim).transpose(1, 2)
        if window is not None:
            position = torch.arange(num_tokens - num_new, num_tokens, device=queries.device)[:, None]
            key = torch.arange(num_tokens, device=queries.device)
            seen = (key <= position) & (key > position - window)
            out = F.scaled_dot_product_attention(heads, keys, values, attn_mask=seen, enable_gqa=True)
        elif num_new == num_tokens:
            out = F.scaled_dot_product_attention(heads, keys, values, is_causal=True, enable_gqa=True)
        else:  # a bias that torch knows, so that its kernel needs no mask in memory
            # Imported here because the import takes a second.
            from torch.nn.attention.bias import causal_lower_right

            bias = causal_lower_right(num_new, num_tokens)
            out = F.scaled_dot_product_attention(heads, keys, values, attn_mask=bias, enable_gqa=True)
        return out.transpose(1, 2).reshape(num_new, -1)


def gathered_keys_and_values(
    cache: KvCache, block_rows: torch.Tensor, num_sequences: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies [num_sequences, num_kv_heads, tokens, head_dim] of the blocks in `block_rows` (of one layer)."""
    gathered = cache.new_gather_buffer(block_rows.shape[0])
    cache.gather(block_rows, gathered)
    return cache.keys_and_values(gathered, num_sequences)


def gathering_rows(config: LlamaConfig, cache: KvCache) -> AttendRows:
    """Gathers the whole table of every row, whatever the rows' lengths are, which takes that much memory."""

    def attend_rows(
        queries: torch.Tensor, layer: int, tables: torch.Tensor, lengths: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        num_rows = queries.shape[0]
        block_rows = tables.reshape(-1).long() * config.num_layers + layer
        keys, values = gathered_keys_and_values(cache, block_rows, num_rows)
        key = torch.arange(keys.shape[2], device=queries.device)
        ends = lengths[:, None]
        seen = key < ends if window is None else (key < ends) & (key >= ends - window)
        heads = queries.reshape(num_rows, config.num_kv_heads, -1, config.head_dim)
        out = F.scaled_dot_product_attention(heads, keys, values, attn_mask=seen[:, None, None])
        return out.reshape(num_rows, -1)

    return attend_rows


def triton_rows(config: LlamaConfig, cache: KvCache, max_keys: int) -> AttendRows:
    """Reads KV in place. Raises EngineError if Triton is not installed."""
    try:
        from shard_server.engines.torch_engine.device import segment_kernels
    except ImportError as error:
        raise EngineError(f"device = 'cuda' needs Triton, which torch's CUDA builds bring: {error}") from error

    scratch = segment_kernels.SegmentScratch(
        _MAX_KERNEL_ROWS, config.num_heads, config.head_dim, max_keys, cache.pool.device
    )

    def attend_rows(
        queries: torch.Tensor, layer: int, tables: torch.Tensor, lengths: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        for start in range(0, queries.shape[0], _MAX_KERNEL_ROWS):
            rows = slice(start, start + _MAX_KERNEL_ROWS)
            segment_kernels.attend_rows(
                queries[rows],
                cache.pool,
                layer,
                tables[rows],
                lengths[rows],
                out[rows],
                scratch,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                block_size=cache.block_size,
                window=window,
            )
        return out

    return attend_rows
