"""Measures, when an engine starts, whether attention gives the same bits in whatever batch it is computed.

Matrix libraries do not promise that: it depends on the CPU, the library's version and the shapes. So it is measured on
random input with the shapes of the model, which takes some hundredths of a second. For products, see linear.py.
"""

from __future__ import annotations

import dataclasses

import torch

from shard_server.engines.torch_engine.config import LlamaConfig
from shard_server.engines.torch_engine.kv_cache import KvCache
from shard_server.engines.torch_engine.operators.attention import Extent, MakeAttention

_NUM_TOKENS = 640
"""More than the 512 keys that the attention kernel takes at a time."""
_PROBED_WINDOW = 100


def attention_is_invariant(config: LlamaConfig, dtype: torch.dtype, block_size: int, make: MakeAttention) -> bool:
    """Compare the prefill of a whole sequence with prefill in chunks and with decoding in batches."""
    # A narrow window, so that the last tokens do not see the first keys of a block that the kernel takes at a time.
    windows = {None if window is None else min(window, _PROBED_WINDOW) for window in config.layer_windows}
    return all(_is_invariant(_AttentionProbe(config, dtype, window, block_size, make)) for window in windows)


def _is_invariant(probe: _AttentionProbe) -> bool:
    whole = probe.attend([], [probe.extent(0, _NUM_TOKENS)])
    chunk_ends = (77, 80, 177, 435, _NUM_TOKENS)
    start = 0
    for end in chunk_ends:
        if not torch.equal(probe.attend([], [probe.extent(start, end)]), whole[start:end]):
            return False
        start = end
    for positions in ([_NUM_TOKENS - 1], [520, 515, 300], list(range(600, 8, -37))):
        decoded = probe.attend([probe.extent(position, position + 1) for position in positions], [])
        if not torch.equal(decoded, whole[positions]):
            return False
    return True


class _AttentionProbe:
    """One layer's attention over one random sequence."""

    def __init__(
        self, config: LlamaConfig, dtype: torch.dtype, window: int | None, block_size: int, make: MakeAttention
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        num_blocks = -(-_NUM_TOKENS // block_size)
        one_layer = dataclasses.replace(config, num_layers=1, layer_windows=(window,))
        cache = KvCache(one_layer, num_blocks=num_blocks, block_size=block_size, dtype=dtype)
        self._attention = make(one_layer, cache)
        kv = torch.randn(_NUM_TOKENS, 2 * config.kv_size, generator=generator)
        self._attention.write(0, range(_NUM_TOKENS), kv.to(dtype))
        self._queries = torch.randn(_NUM_TOKENS, config.query_size, generator=generator).mul_(2).to(dtype)
        self._block_table = list(range(num_blocks))

    def extent(self, start: int, end: int) -> Extent:
        return Extent(first_row=0, num_new=end - start, num_past=start, block_table=self._block_table)

    def attend(self, decodes: list[Extent], prefills: list[Extent]) -> torch.Tensor:
        positions: list[int] = []
        for extent in (*decodes, *prefills):
            extent.first_row = len(positions)
            positions += range(extent.num_past, extent.num_tokens)
        plan = self._attention.plan(decodes, prefills)
        padding = [0] * (plan.num_rows - len(positions))
        return self._attention.attend(plan, 0, self._queries[positions + padding])[: len(positions)]
