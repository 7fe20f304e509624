"""The forward pass as one program of compiled code, from the tokens to the logits; see tasks.py.

The program is built once for the largest number of rows so far. A step fills in its number of rows and the addresses of
its inputs.
"""

from __future__ import annotations

import numpy as np
import torch

from shard_server.engines.torch_engine.config import LlamaConfig
from shard_server.engines.torch_engine.invariance import attention_is_invariant
from shard_server.engines.torch_engine.kernels.amx import request_amx
from shard_server.engines.torch_engine.kernels.tasks import (
    ATTEND,
    HEAD_NORMS,
    INPUT,
    KIND,
    LOOK_UP,
    NORM,
    ROTATE,
    ROWS,
    float_bits,
    program,
    task,
)
from shard_server.engines.torch_engine.kernels.thread_pool import ThreadPool
from shard_server.engines.torch_engine.kernels.tile_attention import TileAttention, TilePlan
from shard_server.engines.torch_engine.kernels.tile_kernels import PASS_DIM
from shard_server.engines.torch_engine.kernels.tile_linear import (
    Bf16Tiles,
    Int8Tiles,
    Operands,
    TileGated,
    TileLinear,
    TileLinears,
    Tiles,
)
from shard_server.engines.torch_engine.kernels.tile_matmul import ADDED, DEPTH, FLOATS, GATED, ROUNDED, TILE
from shard_server.engines.torch_engine.kv_cache import KvCache
from shard_server.engines.torch_engine.linear import MakesLinears, Product, common_row_granularity
from shard_server.engines.torch_engine.model import DecoderLayer, LlamaModel

_ROWS_STEP = 64
"""The number of rows of a workspace is a multiple of this."""


def why_not_compiled(config: LlamaConfig, dtype: torch.dtype, block_size: int) -> str | None:
    """Why CompiledForward cannot be used with this model, cache or machine; None if it can."""
    if dtype != torch.bfloat16:
        return "they are for bfloat16"
    if any(size % DEPTH for size in (config.hidden_size, config.query_size, config.intermediate_size)):
        return f"sizes must be multiples of {DEPTH}"
    if block_size % TILE or config.head_dim % PASS_DIM:
        return f"blocks must be multiples of {TILE} tokens, heads of {PASS_DIM} numbers"
    return None if request_amx() else "this CPU has no AMX"


class CompiledKernels:
    def __init__(self, *, int8_weights: bool) -> None:
        self._threads = ThreadPool()
        self.linears: MakesLinears = TileLinears(Int8Tiles if int8_weights else Bf16Tiles, self._threads)

    def forward(self, model: LlamaModel, config: LlamaConfig, cache: KvCache) -> CompiledForward:
        return CompiledForward(model, config, cache, self._threads)


class CompiledForward:
    """Computes with the weights of a model whose linear layers were built by TileLinears."""

    multiplies_single_rows = False

    def __init__(self, model: LlamaModel, config: LlamaConfig, cache: KvCache, threads: ThreadPool) -> None:
        self._model, self._config, self._cache, self._threads = model, config, cache, threads
        self._attention = TileAttention(config, cache, threads)
        self.plan = self._attention.plan
        self._grow(_ROWS_STEP)

    def logits(self, token_ids: list[int], positions: list[int], logit_rows: list[int], plan: TilePlan) -> torch.Tensor:
        if len(token_ids) > self._max_rows:
            self._grow(len(token_ids))
        inputs = [np.array(numbers, np.int64) for numbers in (token_ids, positions, logit_rows)]
        tokens, places, wanted = (numbers.ctypes.data for numbers in inputs)
        logits = torch.empty(len(logit_rows), _tiles(self._model.head).num_columns)
        tasks = self._tasks
        tasks[: self._first_of_head, ROWS] = len(token_ids)
        tasks[self._first_of_head :, ROWS] = len(logit_rows)
        tasks[0, INPUT] = tokens
        tasks[self._rotations, INPUT] = places
        tasks[self._rotations, INPUT + 1] = plan.slots.ctypes.data
        tasks[self._attentions, INPUT] = plan.words.ctypes.data
        tasks[self._first_of_head, INPUT] = wanted
        tasks[-1, INPUT] = logits.data_ptr()
        self._threads.run(tasks)
        return logits[:, : self._config.vocab_size]

    def _grow(self, num_rows: int) -> None:
        """Make room for `num_rows` rows."""
        model, num_rows = self._model, -(-num_rows // _ROWS_STEP) * _ROWS_STEP
        self._max_rows = 0  # if memory does not suffice, the next step tries to grow again
        self._space = space = _Workspace(model, self._config, num_rows)
        tasks = [self._look_up_task()]
        for index, layer in enumerate(model.layers):
            tasks += self._layer_tasks(index, layer)
        self._first_of_head = len(tasks)
        tasks.append(self._norm_task(space.x, model.norm))
        tasks += _tiles(model.head).tasks(0, FLOATS, space.operands(space.normalised, None))
        self._tasks = program(tasks)
        kinds = self._tasks[:, KIND]
        self._rotations, self._attentions = (np.flatnonzero(kinds == kind) for kind in (ROTATE, ATTEND))
        self._max_rows = num_rows

    def _look_up_task(self) -> list[int]:
        embedding, out = self._model.embedding, self._space.x.data_ptr()
        if embedding is not None:
            return task(LOOK_UP, 0, 0, embedding.data_ptr(), self._config.hidden_size, out)
        tiles = _tiles(self._model.head)
        assert isinstance(tiles, Bf16Tiles)
        return tiles.look_up_task(0, 0, out)

    def _layer_tasks(self, index: int, layer: DecoderLayer) -> list[list[int]]:
        config, space = self._config, self._space
        qkv, x = space.qkv.data_ptr(), space.x
        tasks = [self._norm_task(x, layer.attention_norm)]
        tasks += _tiles(layer.qkv).tasks(0, ROUNDED, space.operands(space.normalised, space.qkv))
        if layer.query_key_norms is not None:
            sizes = config.query_size, config.kv_size, config.head_dim
            weights = (weight.data_ptr() for weight in layer.query_key_norms)
            tasks.append(task(HEAD_NORMS, 0, qkv, *weights, *sizes, float_bits(config.rms_norm_eps)))
        table = self._model.cos.data_ptr(), self._model.sin.data_ptr()
        tasks.append(self._attention.store_task(0, index, qkv, config.query_size, *table))
        tasks.append(self._attention.task(0, index, qkv, space.qkv.shape[1], space.attended.data_ptr()))
        tasks += _tiles(layer.attention_output).tasks(0, ADDED, space.operands(space.attended, x, x))
        tasks.append(self._norm_task(x, layer.mlp_norm))
        tasks += _tiles(layer.gated).tasks(0, GATED, space.operands(space.normalised, space.gated))
        tasks += _tiles(layer.down).tasks(0, ADDED, space.operands(space.gated, x, x))
        return tasks

    def _norm_task(self, x: torch.Tensor, weight: torch.Tensor) -> list[int]:
        addresses = x.data_ptr(), self._space.normalised.data_ptr(), weight.data_ptr()
        return task(NORM, 0, 0, *addresses, self._config.hidden_size, float_bits(self._config.rms_norm_eps))

    def is_invariant(self) -> bool:
        def make(config: LlamaConfig, cache: KvCache) -> TileAttention:
            return TileAttention(config, cache, self._threads)

        granularity = common_row_granularity(self._model.distinct_products, self._cache.dtype)
        return granularity == 1 and attention_is_invariant(
            self._config, self._cache.dtype, self._cache.block_size, make
        )


class _Workspace:
    """The intermediate results of tasks: bf16 [rows, ..], reused by every layer."""

    def __init__(self, model: LlamaModel, config: LlamaConfig, num_rows: int) -> None:
        def new(columns: int) -> torch.Tensor:
            return torch.empty(num_rows, columns, dtype=torch.bfloat16)

        self.x = new(config.hidden_size)
        self.normalised = new(config.hidden_size)
        self.qkv = new(config.query_size + 2 * config.kv_size)
        self.attended = new(config.query_size)
        self.gated = new(config.intermediate_size)
        depth = max(_tiles(product).depth for product in model.distinct_products)
        self._digits = torch.empty(2, num_rows, depth, dtype=torch.int8)
        self._row_scales = torch.empty(num_rows)

    def operands(self, x: torch.Tensor, out: torch.Tensor | None, other: torch.Tensor | None = None) -> Operands:
        """`out` is None if it differs from step to step."""
        rows = self._digits.data_ptr(), self._row_scales.data_ptr()
        return Operands(
            x.data_ptr(), 0 if out is None else out.data_ptr(), *rows, 0 if other is None else other.data_ptr()
        )


def _tiles(product: Product) -> Tiles:
    assert isinstance(product, TileLinear | TileGated)
    return product.tiles
