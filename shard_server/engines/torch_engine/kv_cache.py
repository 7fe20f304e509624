"""The block-based KV cache: one pool of blocks, addressed through block tables."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from shard_server.engines.base import EngineError
from shard_server.engines.torch_engine.config import AttentionConfig
from shard_server.engines.torch_engine.memory import available_memory_bytes, kv_block_bytes

_DEFAULT_WINDOWS = 8
"""The number of full-length sequences for which the default number of blocks has room."""
_CPU = torch.device("cpu")
_CACHE_LINE_BYTES = 64
"""The alignment of the pool: a row of a matrix tile is one cache line."""
_MEMORY_SHARE = 0.5
"""The largest share of the initially free memory for the default number of blocks."""


class KvCache:
    """Keys and values of `num_blocks` blocks of `block_size` tokens.

    All layers of a block lie side by side, so that memory is touched block by block as blocks come into use. Within a
    layer a token's keys and values of all heads do, so that a step writes them with one copy per layer, and attention
    gathers a block with one. (Compiled attention has an order of its own within a layer of a block, see
    kernels/attention/attend.store.)
    """

    def __init__(
        self,
        config: AttentionConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device = _CPU,
    ) -> None:
        """Raises EngineError when there is too little memory (on another device than the CPU:
        torch.OutOfMemoryError)."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self._num_layers = config.num_layers
        self._num_kv_heads = config.num_kv_heads
        self._head_dim = config.head_dim
        token_size = 2 * config.kv_size
        shape = (num_blocks, config.num_layers, block_size * token_size)
        # Zeros, because attention multiplies whatever lies after a sequence's end by 0, and that must not be a NaN.
        self.pool = (
            _lazy_zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
        )
        """[num_blocks, num_layers, block_size * 2 * kv_size]"""
        self._block_rows = self.pool.view(-1, block_size * token_size)
        self.all_token_rows = self.pool.view(-1, token_size)
        """[num_blocks * num_layers * block_size, 2 * kv_size]: the rows that `token_rows` returns indices of"""
        self._layers = torch.arange(config.num_layers, device=device)[:, None]

    def block_rows(self, blocks: Sequence[int]) -> torch.Tensor:
        """int64 [num_layers, len(blocks)]: the argument of `gather` for each layer."""
        return torch.tensor(blocks, device=self.pool.device) * self._num_layers + self._layers

    def token_rows(self, slots: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """int64 [num_layers, len(slots)]: the argument of `write` for each layer. A slot is block * block_size +
        offset."""
        slot = torch.as_tensor(slots, device=self.pool.device)
        offset = slot % self.block_size
        first_layer = (slot - offset) * self._num_layers + offset
        return first_layer + self._layers * self.block_size

    def write(self, token_rows: torch.Tensor, keys_and_values: torch.Tensor) -> None:
        """Store `keys_and_values` [tokens, 2 * kv_size]: the keys of all heads, then the values."""
        self.all_token_rows.index_copy_(0, token_rows, keys_and_values)

    def gather(self, block_rows: torch.Tensor, out: torch.Tensor) -> None:
        """Copy blocks into `out` [blocks, block_size * 2 * kv_size]."""
        torch.index_select(self._block_rows, 0, block_rows, out=out)

    def new_gather_buffer(self, num_blocks: int) -> torch.Tensor:
        """An output buffer of `gather` for `num_blocks` blocks."""
        return self.pool.new_zeros(num_blocks, self.pool.shape[-1])

    def keys_and_values(self, gathered: torch.Tensor, num_sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views [num_sequences, num_kv_heads, tokens, head_dim] of the output of `gather`."""
        tokens = gathered.view(num_sequences, -1, 2, self._num_kv_heads, self._head_dim)
        return tokens[:, :, 0].transpose(1, 2), tokens[:, :, 1].transpose(1, 2)


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose memory the operating system provides at the first write. numpy's zeros are lazy, torch's are not.
    Raises EngineError when there is too little memory."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes > available_memory_bytes():
        raise EngineError(f"{shape[0]} KV blocks need {num_bytes / 2**30:.1f} GiB of memory, more than is free")
    storage = np.zeros(num_bytes + _CACHE_LINE_BYTES, np.uint8)
    start = -storage.ctypes.data % _CACHE_LINE_BYTES
    return torch.from_numpy(storage[start : start + num_bytes]).view(dtype).view(shape)


def default_num_blocks(config: AttentionConfig, *, block_size: int, max_model_len: int, dtype: torch.dtype) -> int:
    """Blocks for 8 full windows, or fewer if those exceed half of the free memory. Raises EngineError when that is less
    than one window."""
    window_blocks = -(-max_model_len // block_size)
    block_bytes = kv_block_bytes(config, block_size, dtype)
    affordable = int(available_memory_bytes() * _MEMORY_SHARE / block_bytes)
    if affordable < window_blocks:
        raise EngineError(
            f"too little memory: one sequence of {max_model_len} tokens needs "
            f"{window_blocks * block_bytes / 2**30:.1f} GiB of KV cache; lower max_model_len or set num_blocks"
        )
    return min(_DEFAULT_WINDOWS * window_blocks, affordable)
