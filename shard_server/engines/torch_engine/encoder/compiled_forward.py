"""The encoder's forward pass as one program of compiled code; see kernels/compiled_forward.py.

Between products there are no operators of torch, whose calls and passes over memory cost as much as the products. Texts
are not padded: their tokens lie one behind the other, and each attends to its own text. Keys and values lie in blocks,
as those of a decoder do, of which one layer's are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from shard_server.engines.torch_engine.encoder.config import EncoderConfig
from shard_server.engines.torch_engine.encoder.model import EncoderLayer, EncoderModel
from shard_server.engines.torch_engine.grouped_weight import AnyWeight, plain, quantised
from shard_server.engines.torch_engine.kernels.codegen.tasks import (
    ATTEND,
    INPUT,
    KIND,
    LAYER_NORM,
    ROTATE,
    ROWS,
    float_bits,
    program,
    task,
)
from shard_server.engines.torch_engine.kernels.packed_linear import PackedLinear, PackedLinears
from shard_server.engines.torch_engine.kernels.packed_weights import (
    DEPTH,
    PREPARED_BYTES,
    Operands,
    PackedBf16,
    PackedWeights,
)
from shard_server.engines.torch_engine.kernels.paged_attention import CompiledAttention
from shard_server.engines.torch_engine.kernels.products.outputs import FLOATS, GELU, ROUNDED
from shard_server.engines.torch_engine.kernels.thread_pool import ThreadPool
from shard_server.engines.torch_engine.kv_cache import KvCache
from shard_server.engines.torch_engine.operators.attention import Extent
from shard_server.engines.torch_engine.operators.linear import Linear, Product, Weight

_ROWS_STEP: Final = 64
"""The number of rows, and of blocks, of a workspace is a multiple of this."""
_BLOCK_SIZE: Final = 16


def why_not_compiled(config: EncoderConfig) -> str | None:
    """Why CompiledEncoder cannot be used with this model; None if it can."""
    if any(size % DEPTH for size in (config.hidden_size, config.intermediate_size, config.attention.head_dim)):
        return f"sizes must be multiples of {DEPTH}"
    return None


class EncoderLinears:
    """Builds linear layers from float32 weights: bf16, or 8 bits in groups of 32."""

    def __init__(self, threads: ThreadPool, *, in_8_bits: bool) -> None:
        self._packed = PackedLinears(PackedBf16, threads)
        self._in_8_bits = in_8_bits

    def linear(self, weight: AnyWeight, bias: torch.Tensor | None) -> Linear:
        floats = plain(weight, torch.float32)
        return self._packed.linear(quantised(floats, 8) if self._in_8_bits else floats.bfloat16(), bias)

    def gated(self, gate: Weight, up: Weight) -> Product:
        raise NotImplementedError("encoders have no gates")


class CompiledEncoder:
    """Computes with the weights of a model whose linear layers were built by EncoderLinears."""

    def __init__(self, model: EncoderModel, config: EncoderConfig, threads: ThreadPool) -> None:
        self._model, self._config, self._threads = model, config, threads
        head_dim = config.attention.head_dim
        self._rotation = torch.ones(head_dim), torch.zeros(head_dim)
        """The cosines and sines of the only position that there is: nothing is rotated."""
        self._grow(_ROWS_STEP, _ROWS_STEP)

    def forward(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        """The hidden states of all tokens, one text after the other: float32 [tokens, hidden_size]."""
        extents, num_rows, num_blocks = _extents(texts)
        if num_rows > self._max_rows or num_blocks > self._max_blocks:
            self._grow(max(num_rows, self._max_rows), max(num_blocks, self._max_blocks))
        space, tasks = self._space, self._program
        self._model.embed(texts, out=space.numbers[0][:num_rows])
        plan = self._attention.plan([], extents, is_causal=False)
        tasks[:, ROWS] = num_rows
        tasks[self._stores, INPUT + 1] = plan.slots.ctypes.data
        tasks[self._attentions, INPUT] = plan.words.ctypes.data
        self._threads.run(tasks)
        return space.numbers[0][:num_rows].clone()

    def _grow(self, num_rows: int, num_blocks: int) -> None:
        """Make room for `num_rows` rows whose keys and values take `num_blocks` blocks."""
        num_rows, num_blocks = (-(-number // _ROWS_STEP) * _ROWS_STEP for number in (num_rows, num_blocks))
        self._max_rows = self._max_blocks = 0  # if memory does not suffice, the next step tries to grow again
        attention = self._config.attention
        cache = KvCache(attention, num_blocks=num_blocks, block_size=_BLOCK_SIZE, dtype=torch.bfloat16)
        self._attention = CompiledAttention(attention, cache, self._threads)
        self._space = space = _Workspace(self._model, self._config, num_rows)
        tasks = [self._norm_task(None, self._model.embedding_norm, space.numbers[0])]
        for layer in self._model.layers:
            tasks += self._layer_tasks(layer)
        self._program = program(tasks)
        self._stores, self._attentions = (np.flatnonzero(self._program[:, KIND] == kind) for kind in (ROTATE, ATTEND))
        self._program[self._stores, INPUT] = space.positions.data_ptr()
        self._max_rows, self._max_blocks = num_rows, num_blocks

    def _layer_tasks(self, layer: EncoderLayer) -> list[list[int]]:
        """`numbers` are the unrounded output of the layer before, and become that of this one; `x` is rounded."""
        space, hidden_size = self._space, self._config.hidden_size
        numbers, middle = space.numbers
        qkv, table = space.qkv.data_ptr(), (part.data_ptr() for part in self._rotation)
        return [
            *_packed(layer.qkv).tasks(0, ROUNDED, space.operands(space.x, space.qkv)),
            self._attention.store_task(0, 0, qkv, hidden_size, *table),
            self._attention.task(0, 0, qkv, space.qkv.shape[1], space.attended.data_ptr()),
            *_packed(layer.attention_output).tasks(0, FLOATS, space.operands(space.attended, middle)),
            self._norm_task(numbers, layer.attention_norm, middle),
            *_packed(layer.intermediate).tasks(0, GELU, space.operands(space.x, space.inner)),
            *_packed(layer.output).tasks(0, FLOATS, space.operands(space.inner, numbers)),
            self._norm_task(middle, layer.output_norm, numbers),
        ]

    def _norm_task(
        self, added: torch.Tensor | None, norm: tuple[torch.Tensor, torch.Tensor], numbers: torch.Tensor
    ) -> list[int]:
        other = 0 if added is None else added.data_ptr()
        weights = (part.data_ptr() for part in norm)
        sizes = self._config.hidden_size, float_bits(self._config.layer_norm_eps)
        return task(LAYER_NORM, 0, numbers.data_ptr(), other, *weights, *sizes, self._space.x.data_ptr())


class _Workspace:
    """The intermediate results of tasks, reused by every layer."""

    def __init__(self, model: EncoderModel, config: EncoderConfig, num_rows: int) -> None:
        def new(columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.empty(num_rows, columns, dtype=dtype)

        hidden_size = config.hidden_size
        self.positions = torch.zeros(num_rows, dtype=torch.int64)
        self.numbers = new(hidden_size, torch.float32), new(hidden_size, torch.float32)
        self.x, self.attended = new(hidden_size), new(hidden_size)
        self.qkv = new(3 * hidden_size)
        self.inner = new(config.intermediate_size)
        depth = max(_packed(product).depth for product in model.distinct_products)
        self._prepared = torch.empty(num_rows, depth * PREPARED_BYTES, dtype=torch.uint8)
        self._row_scales = torch.empty(num_rows)

    def operands(self, x: torch.Tensor, out: torch.Tensor) -> Operands:
        return Operands(x.data_ptr(), out.data_ptr(), self._prepared.data_ptr(), self._row_scales.data_ptr())


def _packed(product: Product) -> PackedWeights:
    assert isinstance(product, PackedLinear)
    return product.weights


def _extents(texts: Sequence[Sequence[int]]) -> tuple[list[Extent], int, int]:
    """Each text's rows and blocks, and the number of both."""
    extents: list[Extent] = []
    num_rows = num_blocks = 0
    for text in texts:
        end = num_blocks + -(-len(text) // _BLOCK_SIZE)
        extents.append(Extent(num_rows, len(text), 0, list(range(num_blocks, end))))
        num_rows, num_blocks = num_rows + len(text), end
    return extents, num_rows, num_blocks
