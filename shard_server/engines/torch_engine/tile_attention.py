"""Attention with AMX tiles (tile_kernels.py): who computes which rows, and where it can run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from shard_server.engines.torch_engine.amx import request_amx
from shard_server.engines.torch_engine.attention import Extent
from shard_server.engines.torch_engine.config import LlamaConfig
from shard_server.engines.torch_engine.kv_cache import KvCache
from shard_server.engines.torch_engine.team import ThreadTeam
from shard_server.engines.torch_engine.tile_kernels import (
    PASS_DIM,
    PIECE_TOKENS,
    TILE,
    Shape,
    attend_pieces,
    new_scratch,
)

_NO_WINDOW = 1 << 40

_Array = np.ndarray[Any, Any]


@dataclasses.dataclass(slots=True)
class TilePlan:
    """What every layer of one step does; made once per step."""

    token_rows: torch.Tensor
    """int64 [layers, tokens]: where the KV of each token goes."""
    num_rows: int
    tables: _Array
    """int64: block tables, one behind the other"""
    parts: list[_Array]
    """A thread's each: int64 [pieces, (first row, rows, position of the first, where its table begins)]"""


class TileAttention:
    """Attention with compiled kernels."""

    multiplies_single_rows = False

    def __init__(self, config: LlamaConfig, cache: KvCache) -> None:
        self._cache = cache
        self._team = ThreadTeam()
        self._layer_windows = [_NO_WINDOW if window is None else window for window in config.layer_windows]
        token_size = 2 * config.kv_size
        self._shape = Shape(
            cache.block_size,
            config.num_kv_heads,
            config.num_heads_per_kv_head,
            config.head_dim,
            config.num_layers * cache.block_size * token_size,
            token_size,
        )
        # Scores are turned into powers of two.
        self._scale = np.float32(config.head_dim**-0.5 * math.log2(math.e))
        self._pool = cache.pool.view(torch.uint16).numpy().reshape(-1)
        self._words = self._pool.view(np.uint32)
        self._scratches = [new_scratch(self._shape) for _ in range(self._team.num_threads)]

    def plan(self, decodes: Sequence[Extent], prefills: Sequence[Extent]) -> TilePlan:
        """`decodes` have one new token each; their rows are 0, 1, 2 ...; the rows of `prefills` follow."""
        block_size = self._cache.block_size
        slots: list[int] = []
        tables: list[int] = []
        pieces: list[tuple[int, int, int, int]] = []
        for extent in (*decodes, *prefills):
            for start in range(0, extent.num_new, PIECE_TOKENS):
                num_rows = min(PIECE_TOKENS, extent.num_new - start)
                pieces.append((extent.first_row + start, num_rows, extent.num_past + start, len(tables)))
            table = extent.block_table
            slots += [
                table[position // block_size] * block_size + position % block_size
                for position in range(extent.num_past, extent.num_tokens)
            ]
            tables += table[: -(-extent.num_tokens // block_size)]
        return TilePlan(
            token_rows=self._cache.token_rows(slots),
            num_rows=len(slots),
            tables=np.array(tables, np.int64),
            parts=[np.array(part, np.int64) for part in _shared_out(pieces, self._team.num_threads)],
        )

    def attend(self, plan: TilePlan, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """`queries` [num_rows, num_heads * head_dim] (any row stride) → the same shape. KV must be written already."""
        out = torch.zeros_like(queries, memory_format=torch.contiguous_format)
        query_bits, out_bits = queries.view(torch.uint16).numpy(), out.view(torch.uint16).numpy()
        window = self._layer_windows[layer]

        def attend_part(index: int) -> None:
            attend_pieces(
                self._pool,
                self._words,
                layer,
                plan.tables,
                plan.parts[index],
                self._shape,
                query_bits,
                out_bits,
                window,
                self._scale,
                self._scratches[index],
            )

        self._team.run(attend_part, len(plan.parts))
        return out


def why_not_tiles(config: LlamaConfig, cache: KvCache) -> str | None:
    """What keeps TileAttention from this model, cache or machine; None: nothing."""
    if cache.dtype != torch.bfloat16:
        return "it is for bfloat16"
    if cache.block_size % TILE or config.head_dim % PASS_DIM:
        return f"blocks must be multiples of {TILE} tokens, heads of {PASS_DIM} numbers"
    return None if request_amx() else "this CPU has no AMX"


def _shared_out(pieces: list[tuple[int, int, int, int]], num_threads: int) -> list[list[tuple[int, int, int, int]]]:
    """The costliest first, each to the thread that has least; order within a thread as given."""
    parts: list[list[int]] = [[] for _ in range(num_threads)]
    costs = [0] * num_threads
    by_cost = [(num_rows * (position + num_rows), index) for index, (_, num_rows, position, _) in enumerate(pieces)]
    for cost, index in sorted(by_cost, reverse=True):
        thread = costs.index(min(costs))
        costs[thread] += cost
        parts[thread].append(index)
    return [[pieces[index] for index in sorted(part)] for part in parts if part]
