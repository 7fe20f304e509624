"""Attention with compiled kernels (attention/): which thread computes which rows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from shard_server.engines.torch_engine.config import AttentionConfig
from shard_server.engines.torch_engine.kernels.attention.attend import PIECE_SIZE
from shard_server.engines.torch_engine.kernels.attention.scratch import PIECE_TOKENS, AttentionShape, scratch_bytes
from shard_server.engines.torch_engine.kernels.codegen.compiled import aligned_zeros
from shard_server.engines.torch_engine.kernels.codegen.tasks import ATTEND, INPUT, ROTATE, float_bits, program, task
from shard_server.engines.torch_engine.kernels.thread_pool import ThreadPool
from shard_server.engines.torch_engine.kv_cache import KvCache
from shard_server.engines.torch_engine.operators.attention import Extent

_NO_WINDOW = 1 << 40
_PIECES_PER_THREAD = 4
"""With fewer pieces per thread, their heads are distributed over threads, too."""

_Array = np.ndarray[Any, Any]
Piece = tuple[int, int, int, int, int, int, int]
"""See attend_pieces."""


@dataclasses.dataclass(slots=True)
class CompiledPlan:
    """The plan of every layer in one step; made once per step."""

    num_rows: int
    slots: _Array
    """int64 [rows]: where the KV of each token is stored; see KvCache.token_rows"""
    words: _Array
    """int64: the number of parts that threads share; of block numbers in all tables; where each part's pieces begin,
    and where the last ones end; the pieces (see attend_pieces); the concatenated block tables."""


class CompiledAttention:
    """Attention with compiled kernels."""

    multiplies_single_rows = False

    def __init__(self, config: AttentionConfig, cache: KvCache, threads: ThreadPool) -> None:
        self._block_size = cache.block_size
        self._num_layers, self._kv_size, self._head_dim = config.num_layers, config.kv_size, config.head_dim
        self._threads = threads
        self._layer_windows = [_NO_WINDOW if window is None else window for window in config.layer_windows]
        self._num_kv_heads = config.num_kv_heads
        token_size = 2 * config.kv_size
        shape = AttentionShape(
            cache.block_size,
            config.num_kv_heads,
            config.num_heads_per_kv_head,
            config.head_dim,
            config.num_layers * cache.block_size * token_size,
            token_size,
        )
        # Weights are computed as powers of two.
        scale = config.head_dim**-0.5 * math.log2(math.e)
        self._pool = cache.pool
        self._scratches = aligned_zeros(scratch_bytes(shape) * threads.num_threads, np.uint8)
        scratches = self._scratches.ctypes.data, scratch_bytes(shape)
        self._constants = np.array([self._pool.data_ptr(), self._pool.numel(), *scratches, float_bits(scale), *shape])
        """The constants of all layers, as in attend_tasks.attend_rows"""

    def plan(self, decodes: Sequence[Extent], prefills: Sequence[Extent], *, is_causal: bool = True) -> CompiledPlan:
        """`decodes` have one new token each; their rows are 0, 1, 2 ...; the rows of `prefills` follow. A token sees
        those before it, or all of its sequence unless `is_causal`."""
        block_size, num_heads = self._block_size, self._num_kv_heads
        slots: list[int] = []
        tables: list[int] = []
        pieces: list[Piece] = []
        for extent in (*decodes, *prefills):
            for start in range(0, extent.num_new, PIECE_TOKENS):
                num_rows = min(PIECE_TOKENS, extent.num_new - start)
                position = extent.num_past + start if is_causal else extent.num_tokens - 1
                first_row, step = extent.first_row + start, int(is_causal)
                pieces.append((first_row, num_rows, position, len(tables), 0, num_heads, step))
            table = extent.block_table
            slots += [
                table[position // block_size] * block_size + position % block_size
                for position in range(extent.num_past, extent.num_tokens)
            ]
            tables += table[: -(-extent.num_tokens // block_size)]
        if len(pieces) < _PIECES_PER_THREAD * self._threads.num_threads > _PIECES_PER_THREAD:
            pieces = [(*piece[:4], head, head + 1, piece[6]) for piece in pieces for head in range(num_heads)]
        parts = _balanced(pieces, self._threads.num_threads)
        ends = [0]
        for part in parts:
            ends.append(ends[-1] + PIECE_SIZE * len(part))
        numbers = [number for part in parts for piece in part for number in piece]
        words = np.array([len(parts), len(tables), *ends, *numbers, *tables], np.int64)
        return CompiledPlan(len(slots), np.array(slots, np.int64), words)

    def task(self, num_rows: int, layer: int, queries: int, stride: int, out: int) -> list[int]:
        """`queries`, rows `stride` numbers apart, and `out` are addresses. The caller fills in the address of a plan's
        words."""
        window = self._layer_windows[layer]
        return task(ATTEND, num_rows, 0, queries, stride, out, layer, window, self._constants.ctypes.data)

    def store_task(
        self, num_rows: int, layer: int, qkv: int, query_size: int, cos: int, sin: int, *inputs: int
    ) -> list[int]:
        """Rotate queries and keys and store the keys and values of `qkv` (bf16 [rows, query_size + 2 * kv_size]). See
        rope.rotation_table for `cos` and `sin`; `inputs` are int64 positions and slots. All are addresses; those of the
        inputs may be filled in later."""
        positions, slots = inputs or (0, 0)
        sizes = query_size, self._kv_size, self._head_dim
        cache = self._pool.data_ptr(), self._block_size, self._num_layers, layer
        return task(ROTATE, num_rows, positions, slots, qkv, cos, sin, *sizes, *cache)

    def write(self, layer: int, slots: Sequence[int], keys_and_values: torch.Tensor) -> None:
        """Store `keys_and_values` [len(slots), 2 * kv_size], in the layout that `attend` reads."""
        ones, zeros = torch.ones(self._head_dim), torch.zeros(self._head_dim)  # no rotation
        places = np.array([[0] * len(slots), slots], np.int64)
        tensors = (tensor.data_ptr() for tensor in (ones, zeros))
        qkv = keys_and_values.clone(memory_format=torch.contiguous_format)
        inputs = (row.ctypes.data for row in places)
        self._threads.run(program([self.store_task(len(slots), layer, qkv.data_ptr(), 0, *tensors, *inputs)]))

    def attend(self, plan: CompiledPlan, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """`queries` [num_rows, num_heads * head_dim] (any row stride) → the same shape. The KV must be stored
        already."""
        out = torch.zeros_like(queries, memory_format=torch.contiguous_format)
        tasks = program([self.task(len(queries), layer, queries.data_ptr(), queries.stride(0), out.data_ptr())])
        tasks[:, INPUT] = plan.words.ctypes.data
        self._threads.run(tasks)
        return out


def _balanced(pieces: list[Piece], num_threads: int) -> list[list[Piece]]:
    """Distribute pieces over threads: the most expensive first, each to the thread with the least work. A thread's
    pieces keep their order."""
    parts: list[list[int]] = [[] for _ in range(num_threads)]
    costs = [0] * num_threads
    by_cost = [(num_rows * (position + num_rows), index) for index, (_, num_rows, position, *_) in enumerate(pieces)]
    for cost, index in sorted(by_cost, reverse=True):
        thread = costs.index(min(costs))
        costs[thread] += cost
        parts[thread].append(index)
    return [[pieces[index] for index in sorted(part)] for part in parts if part]
