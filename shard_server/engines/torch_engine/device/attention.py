"""Attention over the block-based KV cache on an accelerator, in fixed shapes, so that a decode step can be recorded
once, and no kernel is compiled while requests are served.

Rows of decoding attend by themselves, those of prompts in pieces, all prompts of a step together. There are two
implementations of the same meaning: Triton kernels (segment_kernels.py, prompt_kernels.py), which run on a GPU, and a
plain one that gathers, which says what is meant and runs anywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from shard_server.engines.base import EngineError
from shard_server.engines.torch_engine.config import LlamaConfig
from shard_server.engines.torch_engine.kv_cache import KvCache
from shard_server.engines.torch_engine.operators.attention import Extent
from shard_server.engines.torch_engine.uploads import upload_tensor

_MAX_KERNEL_ROWS = 256
"""The number of rows for which there is room for partial results at a time."""
_PIECE_ROWS: Final = {2: 128, 4: 32}
"""The rows of a product in a kernel of prompts, by the bytes of a number: a head of a token is a row."""


@dataclasses.dataclass(slots=True)
class SingleRows:
    """Rows that attend by themselves."""

    tables: torch.Tensor
    """int32 [rows, blocks]: the block table of each row's sequence"""
    lengths: torch.Tensor
    """int32 [rows]: the keys of each row, its own included"""

    def to(self, device: torch.device) -> SingleRows:
        return SingleRows(upload_tensor(self.tables, device), upload_tensor(self.lengths, device))


@dataclasses.dataclass(slots=True)
class Prompts:
    """Rows of prompts, in pieces of neighbouring ones."""

    tables: torch.Tensor
    """int32 [prompts, blocks]"""
    pieces: torch.Tensor
    """int32 [pieces, 4]: (prompt, first row, rows, position of the first row's token)"""

    def to(self, device: torch.device) -> Prompts:
        return Prompts(upload_tensor(self.tables, device), upload_tensor(self.pieces, device))

    def each_row(self) -> SingleRows:
        """The same rows, each by itself."""
        pieces = self.pieces.tolist()
        num_rows = sum(num for _, _, num, _ in pieces)
        tables = self.tables.new_zeros(num_rows, self.tables.shape[1])
        lengths = self.tables.new_zeros(num_rows)
        for prompt, first, num, position in pieces:
            tables[first : first + num] = self.tables[prompt]
            lengths[first : first + num] = torch.arange(position + 1, position + 1 + num)
        return SingleRows(tables, lengths)


def prompts_of(extents: Sequence[Extent], max_rows: int) -> Prompts:
    """Cut prompts into pieces of at most `max_rows` tokens, the ones with most keys first, since they take longest."""
    tables = np.zeros((len(extents), max(len(extent.block_table) for extent in extents)), np.int32)
    pieces: list[tuple[int, int, int, int]] = []
    for index, extent in enumerate(extents):
        tables[index, : len(extent.block_table)] = extent.block_table
        for start in range(0, extent.num_new, max_rows):
            num = min(max_rows, extent.num_new - start)
            pieces.append((index, extent.first_row + start, num, extent.num_past + start))
    pieces.sort(key=lambda piece: -(piece[2] + piece[3]))
    return Prompts(torch.from_numpy(tables), torch.tensor(pieces, dtype=torch.int32))


def piece_tokens(config: LlamaConfig, dtype: torch.dtype) -> int:
    """The tokens of a full piece. Heads that share keys take a power of two of rows."""
    group = config.num_heads // config.num_kv_heads
    return max(1, _PIECE_ROWS[dtype.itemsize] >> (group - 1).bit_length())


AttendPaged = Callable[[SingleRows | Prompts, int, torch.Tensor, int | None], torch.Tensor]
"""(rows, layer, queries [rows, heads * head_dim] with any row stride, window) → [rows, heads * head_dim]. A row sees
the keys up to its own token, or the last `window` of them; they must be stored already."""


def gathering_attention(config: LlamaConfig, cache: KvCache) -> AttendPaged:
    """Gathers the whole table of every row, whatever the rows' lengths are, which takes that much memory."""

    def attend(part: SingleRows | Prompts, layer: int, queries: torch.Tensor, window: int | None) -> torch.Tensor:
        rows = part if isinstance(part, SingleRows) else part.each_row()
        block_rows = rows.tables.reshape(-1).long() * config.num_layers + layer
        gathered = cache.new_gather_buffer(block_rows.shape[0])
        cache.gather(block_rows, gathered)
        keys, values = cache.keys_and_values(gathered, len(rows.lengths))
        key = torch.arange(keys.shape[2], device=queries.device)
        ends = rows.lengths[:, None]
        seen = key < ends if window is None else (key < ends) & (key >= ends - window)
        heads = queries.reshape(len(rows.lengths), config.num_kv_heads, -1, config.head_dim)
        out = F.scaled_dot_product_attention(heads, keys, values, attn_mask=seen[:, None, None])
        return out.reshape(len(rows.lengths), -1)

    return attend


def triton_attention(config: LlamaConfig, cache: KvCache, max_keys: int) -> AttendPaged:
    """Reads KV in place. Raises EngineError if Triton is not installed."""
    try:
        from shard_server.engines.torch_engine.device import prompt_kernels, segment_kernels
    except ImportError as error:
        raise EngineError(f"device = 'cuda' needs Triton, which torch's CUDA builds bring: {error}") from error

    scratch = segment_kernels.SegmentScratch(
        _MAX_KERNEL_ROWS, config.num_heads, config.head_dim, max_keys, cache.pool.device
    )
    sizes = {"num_kv_heads": config.num_kv_heads, "head_dim": config.head_dim, "block_size": cache.block_size}
    max_tokens = piece_tokens(config, cache.dtype)

    def attend(part: SingleRows | Prompts, layer: int, queries: torch.Tensor, window: int | None) -> torch.Tensor:
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        if isinstance(part, Prompts):
            prompt_kernels.attend_prompts(
                queries, cache.pool, layer, part.tables, part.pieces, out, **sizes, max_tokens=max_tokens, window=window
            )
            return out
        for start in range(0, queries.shape[0], _MAX_KERNEL_ROWS):
            rows = slice(start, start + _MAX_KERNEL_ROWS)
            segment_kernels.attend_rows(
                queries[rows],
                cache.pool,
                layer,
                part.tables[rows],
                part.lengths[rows],
                out[rows],
                scratch,
                **sizes,
                window=window,
            )
        return out

    return attend
