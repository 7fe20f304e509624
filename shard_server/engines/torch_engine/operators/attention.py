"""Causal attention over the block-based KV cache, for a ragged batch, with the same bits whatever the batch is.

torch's CPU flash attention walks over the keys in blocks of 512 in order, with float32 sums. Its result for a row
depends neither on how far the keys are padded (with masked ones, see `Grain`), nor on how many sequences or rows there
are, as long as the rows are not split unevenly (see `_ROWS_PER_TILE`). So one kernel serves prefill,
chunked prefill and decoding; `attention_is_invariant` measures whether this machine's library complies.

Layers with a window omit leading keys that none of their rows sees, in steps of the kernel's own 512: a row's keys come
in the same blocks whatever is computed with it, and a block that it does not see leaves no trace in its sums.

Gathering blocks into contiguous memory is cheap if the copy is still in the CPU's cache when it is read:
decoding sequences are sorted by length and gathered in groups that fit there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F  # noqa: N812

from shard_server.engines.torch_engine.config import LlamaConfig
from shard_server.engines.torch_engine.kv_cache import KvCache

_ROWS_PER_TILE = 32
"""The kernel cuts query rows into tiles of 32 (up to 191 rows): a smaller last tile may be computed by different
code."""
_PIECE_TOKENS = 128
"""A prompt's queries are computed in pieces, so that later keys, which are masked, are not computed for all of them."""
_GROUP_TOKENS = 3072
"""The number of keys of decoding sequences that are gathered together: 2.3 MB in the built-in model."""
_GROUP_WASTE_TOKENS = 192
"""The padding in a group beyond which another group is cheaper."""
_KERNEL_KEYS = 512
"""The number of keys that the kernel computes at a time."""


class Grain(NamedTuple):
    """Sizes for which the kernel always uses the same code."""

    num_keys: int
    """Keys are padded to a multiple of this."""
    min_decode_rows: int
    """The kernel has different code for few query rows; a decoding sequence has one per head that shares a KV head."""


_WHOLE = Grain(num_keys=_KERNEL_KEYS, min_decode_rows=8)
GRAINS = {torch.bfloat16: (Grain(num_keys=32, min_decode_rows=2), _WHOLE), torch.float32: (_WHOLE,)}
"""Cheapest first; the first with which this machine's results do not depend on the batch is used. Matrix tiles (AMX)
take 32 keys and exponentials are vectors of 16, so leftovers would be computed by code that rounds differently. The
blocking of other products is undocumented: only the kernel's whole 512 was measured to work."""

_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclasses.dataclass(slots=True)
class Extent:
    """The tokens of one sequence in a batch: `num_new` rows from `first_row` on, after `num_past` earlier tokens."""

    first_row: int
    num_new: int
    num_past: int
    block_table: Sequence[int]

    @property
    def num_tokens(self) -> int:
        return self.num_past + self.num_new


@dataclasses.dataclass(slots=True)
class _DecodeGroup:
    first_row: int
    num_sequences: int
    block_rows: torch.Tensor
    """int64 [layers, num_sequences * blocks per sequence]"""
    mask: torch.Tensor
    """float32 [num_sequences, 1, 1, keys]: 0, or -inf where there is no key."""


@dataclasses.dataclass(slots=True)
class _Prefill:
    block_rows: torch.Tensor
    """int64 [layers, blocks]"""
    pieces: list[tuple[int, int, int, torch.Tensor]]
    """(first row, rows, first of the gathered keys, mask float32 [1, 1, padded rows, keys])"""


@dataclasses.dataclass(slots=True)
class _WindowPlan:
    """The plan for the layers with one window."""

    decode_groups: list[_DecodeGroup]
    prefills: list[_Prefill]


@dataclasses.dataclass(slots=True)
class AttentionPlan:
    """The plan of every layer in one step; made once per step."""

    token_rows: torch.Tensor
    """int64 [layers, tokens]: where the KV of each token is stored."""
    num_rows: int
    """The number of rows that the batch must have, including padding."""
    windows: dict[int | None, _WindowPlan]
    """By the layers' window."""

    @property
    def max_gathered_blocks(self) -> int:
        plans = self.windows.values()
        return max(part.block_rows.shape[1] for plan in plans for part in (*plan.decode_groups, *plan.prefills))


class Attention(Protocol):
    """Attention of one model over one KV cache."""

    multiplies_single_rows: bool
    """True when several rows of one sequence are cheaper when they are computed as rows of different sequences."""

    def plan(self, decodes: Sequence[Extent], prefills: Sequence[Extent]) -> Any:
        """The plan of every layer in a step, with its `token_rows` and `num_rows` (see AttentionPlan)."""
        ...

    def write(self, layer: int, slots: Sequence[int], keys_and_values: torch.Tensor) -> None:
        """Store `keys_and_values` [len(slots), 2 * kv_size] for `attend`. A slot is block * block_size + offset."""
        ...

    def attend(self, plan: Any, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """`queries` [num_rows, num_heads * head_dim] (any row stride) → the same shape. The KV must be stored
        already."""
        ...


MakeAttention = Callable[[LlamaConfig, KvCache], Attention]


class PagedAttention:
    """Attention with torch's kernel."""

    multiplies_single_rows = True

    def __init__(self, config: LlamaConfig, cache: KvCache, grain: Grain) -> None:
        self._cache = cache
        self._num_kv_heads = config.num_kv_heads
        self._group_size = config.num_heads_per_kv_head
        self._head_dim = config.head_dim
        self._padded_decode_rows = max(0, grain.min_decode_rows - self._group_size)
        self._key_alignment = math.lcm(grain.num_keys, cache.block_size)
        self._first_key_alignment = math.lcm(_KERNEL_KEYS, cache.block_size)
        self._layer_windows = config.layer_windows
        self._buffer = cache.new_gather_buffer(_GROUP_TOKENS // cache.block_size)

    def plan(self, decodes: Sequence[Extent], prefills: Sequence[Extent]) -> AttentionPlan:
        """`decodes` have one new token each and are sorted by num_tokens, longest first; their rows are 0, 1, 2 ...
        The rows of `prefills` follow."""
        slots = [self._slot(extent, extent.num_past) for extent in decodes]
        for extent in prefills:
            slots += [self._slot(extent, position) for position in range(extent.num_past, extent.num_tokens)]
        windows = {
            window: _WindowPlan(
                self._plan_decodes(decodes, window), [self._plan_prefill(extent, window) for extent in prefills]
            )
            for window in set(self._layer_windows)
        }
        any_window = next(iter(windows.values()))
        piece_ends = [first + mask.shape[2] for part in any_window.prefills for first, _, _, mask in part.pieces]
        plan = AttentionPlan(
            token_rows=self._cache.token_rows(slots), num_rows=max([len(slots), *piece_ends]), windows=windows
        )
        if plan.max_gathered_blocks > self._buffer.shape[0]:
            self._buffer = self._cache.new_gather_buffer(plan.max_gathered_blocks)
        return plan

    def write(self, layer: int, slots: Sequence[int], keys_and_values: torch.Tensor) -> None:
        self._cache.write(self._cache.token_rows(slots)[layer], keys_and_values)

    def attend(self, plan: AttentionPlan, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """`queries` [num_rows, num_heads * head_dim] (any row stride) → the same shape. The KV must be stored
        already."""
        heads = queries.view(-1, self._num_kv_heads, self._group_size, self._head_dim)
        out = torch.zeros_like(heads, memory_format=torch.contiguous_format)
        parts = plan.windows[self._layer_windows[layer]]
        for group in parts.decode_groups:
            rows = slice(group.first_row, group.first_row + group.num_sequences)
            keys, values = self._gather(group.block_rows[layer], group.num_sequences)
            query = heads[rows]
            if self._padded_decode_rows:
                query = F.pad(query, (0, 0, 0, self._padded_decode_rows))
            attended = _flash_attention(query, keys, values, attn_mask=group.mask)[0]
            out[rows] = attended[:, :, : self._group_size]
        for part in parts.prefills:
            keys, values = self._gather(part.block_rows[layer], 1)
            for first_row, num_rows, first_key, mask in part.pieces:
                num_padded, seen = mask.shape[2], slice(first_key, first_key + mask.shape[3])
                # The heads that share keys are the kernel's batch: they see the same keys through a stride of 0.
                query = heads[first_row : first_row + num_padded].permute(2, 1, 0, 3)
                shared = (self._group_size, -1, -1, -1)
                attended = _flash_attention(
                    query, keys[:, :, seen].expand(shared), values[:, :, seen].expand(shared), attn_mask=mask
                )[0]
                out[first_row : first_row + num_rows] = attended[:, :, :num_rows].permute(2, 1, 0, 3)
        return out.view(queries.shape[0], -1)

    def _gather(self, block_rows: torch.Tensor, num_sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
        gathered = self._buffer[: block_rows.shape[0]]
        self._cache.gather(block_rows, gathered)
        return self._cache.keys_and_values(gathered, num_sequences)

    def _slot(self, extent: Extent, position: int) -> int:
        block, offset = divmod(position, self._cache.block_size)
        return extent.block_table[block] * self._cache.block_size + offset

    def _num_keys(self, num_tokens: int) -> int:
        return -(-num_tokens // self._key_alignment) * self._key_alignment

    def _first_key(self, position: int, window: int | None) -> int:
        """The first key to gather for a row at `position` and the rows after it."""
        if window is None:
            return 0
        return max(0, position + 1 - window) // self._first_key_alignment * self._first_key_alignment

    def _blocks(self, extent: Extent, first_key: int, num_keys: int) -> list[int]:
        """The sequence's blocks from `first_key` on, padded with block 0, whose content is masked."""
        block_size = self._cache.block_size
        used = list(extent.block_table[first_key // block_size : -(-extent.num_tokens // block_size)])
        return used + [0] * (num_keys // block_size - len(used))

    def _plan_decodes(self, decodes: Sequence[Extent], window: int | None) -> list[_DecodeGroup]:
        first_keys = [self._first_key(extent.num_past, window) for extent in decodes]
        lengths = [extent.num_tokens - first for extent, first in zip(decodes, first_keys, strict=True)]
        groups: list[_DecodeGroup] = []
        first = 0
        while first < len(decodes):
            num_keys = self._num_keys(lengths[first])
            end, waste = first + 1, 0
            # With a window, a sequence after the longest may need more keys; the next group then begins with it.
            while end < len(decodes) and (end + 1 - first) * num_keys <= _GROUP_TOKENS and lengths[end] <= num_keys:
                waste += num_keys - lengths[end]
                if waste > _GROUP_WASTE_TOKENS:
                    break
                end += 1
            blocks: list[int] = []
            for extent, first_key in zip(decodes[first:end], first_keys[first:end], strict=True):
                blocks += self._blocks(extent, first_key, num_keys)
            mask = _decode_mask(lengths[first:end], num_keys, window)
            block_rows = self._cache.block_rows(blocks)
            groups.append(_DecodeGroup(decodes[first].first_row, end - first, block_rows, mask))
            first = end
        return groups

    def _plan_prefill(self, extent: Extent, window: int | None) -> _Prefill:
        first_gathered = self._first_key(extent.num_past, window)
        num_gathered = self._num_keys(extent.num_tokens) - first_gathered
        block_rows = self._cache.block_rows(self._blocks(extent, first_gathered, num_gathered))
        pieces: list[tuple[int, int, int, torch.Tensor]] = []
        for start in range(0, extent.num_new, _PIECE_TOKENS):
            num_rows = min(_PIECE_TOKENS, extent.num_new - start)
            num_padded = -(-num_rows // _ROWS_PER_TILE) * _ROWS_PER_TILE
            first_position = extent.num_past + start
            first_key = self._first_key(first_position, window)
            keys = torch.arange(first_key, self._num_keys(first_position + num_rows))
            positions = torch.arange(first_position, first_position + num_padded)[:, None]
            hidden = keys > positions
            if window is not None:
                hidden |= keys <= positions - window
            mask = torch.zeros(hidden.shape).masked_fill_(hidden, -math.inf)[None, None]
            pieces.append((extent.first_row + start, num_rows, first_key - first_gathered, mask))
        return _Prefill(block_rows, pieces)


def _decode_mask(lengths: Sequence[int], num_keys: int, window: int | None) -> torch.Tensor:
    """float32 [sequences, 1, 1, num_keys]; `lengths`: keys up to each sequence's last, from the first gathered one."""
    ends = torch.tensor(lengths)[:, None]
    keys = torch.arange(num_keys)
    hidden = keys >= ends
    if window is not None:
        hidden |= keys < ends - window
    return torch.zeros(hidden.shape).masked_fill_(hidden, -math.inf)[:, None, None]
