"""The forward pass as one program of compiled code, from the tokens to the logits; see tasks.py.

The program is built once for the largest number of rows so far. A step fills in its number of rows and the addresses of
its inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from shard_server.engines.torch_engine.config import AttentionConfig, LlamaConfig
from shard_server.engines.torch_engine.core_share import CoreShare
from shard_server.engines.torch_engine.kernels.adapter_rows import ENTRY_SIZE
from shard_server.engines.torch_engine.kernels.choice import OnProgress, choose_family
from shard_server.engines.torch_engine.kernels.codegen.tasks import (
    ADAPT,
    ATTEND,
    GATE,
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
from shard_server.engines.torch_engine.kernels.families import GENERIC, Products, runnable_families
from shard_server.engines.torch_engine.kernels.packed_linear import PackedGated, PackedLinear, PackedLinears
from shard_server.engines.torch_engine.kernels.packed_weights import (
    DEPTH,
    PREPARED_BYTES,
    Kept,
    Operands,
    PackedBf16,
    PackedInt8,
    PackedWeights,
    in_own_memory,
)
from shard_server.engines.torch_engine.kernels.paged_attention import CompiledAttention, CompiledPlan
from shard_server.engines.torch_engine.kernels.products.outputs import ADDED, FLOATS, GATED, ROUNDED, TILE
from shard_server.engines.torch_engine.kernels.self_check import rows_are_independent, why_wrong
from shard_server.engines.torch_engine.kernels.thread_pool import ThreadPool
from shard_server.engines.torch_engine.kv_cache import KvCache
from shard_server.engines.torch_engine.lora.peft import MODULES, LoraWeights
from shard_server.engines.torch_engine.model import DecoderLayer, LlamaModel
from shard_server.engines.torch_engine.operators.invariance import attention_is_invariant
from shard_server.engines.torch_engine.operators.linear import MakesLinears, Product


class PackedAdapter:
    """An adapter as compiled code reads it."""

    def __init__(self, weights: LoraWeights, num_layers: int) -> None:
        self._table = np.zeros((num_layers * len(MODULES), ENTRY_SIZE), np.int64)
        self._tensors: list[torch.Tensor] = []
        for (layer, module), (a, b) in weights.parts.items():
            both = a.to(torch.bfloat16).contiguous(), b.T.to(torch.bfloat16).contiguous()
            self._tensors += both
            self._table[entry_of(layer, module)] = both[0].data_ptr(), both[1].data_ptr(), weights.rank
        self.address = int(self._table.ctypes.data)


def entry_of(layer: int, module: str) -> int:
    """The place in an adapter's table."""
    return layer * len(MODULES) + MODULES.index(module)


class AdaptedTasks:
    """Makes the tasks of adapters for one workspace, and keeps the memory that only they need."""

    def __init__(self, config: LlamaConfig, num_rows: int, num_threads: int) -> None:
        self._inner_size = config.intermediate_size
        self._scratches = torch.empty(num_threads, max(config.hidden_size, config.query_size, config.intermediate_size))
        self.factors = torch.empty(num_rows, 2 * config.intermediate_size)
        """float32: what the product of gate and up gives, tiles of both alternating."""

    def tasks(
        self, layer: int, modules: Sequence[str], sizes: Sequence[int], x: torch.Tensor, out: torch.Tensor
    ) -> list[list[int]]:
        """Add to `out` (bf16 [rows, ..]) what adapters change in products of `x`, whose `sizes` follow one another."""
        found: list[list[int]] = []
        first = out.data_ptr()
        for module, size in zip(modules, sizes, strict=True):
            found.append(self._task(layer, module, x, first, out.shape[1], size, alternates=False))
            first += size * out.element_size()
        return found

    def gated_tasks(self, layer: int, x: torch.Tensor, out: torch.Tensor) -> list[list[int]]:
        """Change `factors`, the product of `x`, and put their gated product into `out`."""
        first, size = self.factors.data_ptr(), self._inner_size
        return [
            self._task(layer, "gate_proj", x, first, 2 * size, size, alternates=True),
            self._task(layer, "up_proj", x, first + TILE * 4, 2 * size, size, alternates=True),
            task(GATE, 0, first, size, out.data_ptr()),
        ]

    def _task(
        self, layer: int, module: str, x: torch.Tensor, out: int, row_size: int, size: int, *, alternates: bool
    ) -> list[int]:
        scratch = self._scratches.data_ptr(), self._scratches.shape[1]
        arguments = entry_of(layer, module), x.data_ptr(), x.shape[1], *scratch, out, row_size, size, int(alternates)
        return task(ADAPT, 0, 0, *arguments)


_ROWS_STEP = 64
"""The number of rows of a workspace is a multiple of this."""


def why_not_compiled(config: LlamaConfig, block_size: int) -> str | None:
    """Why CompiledForward cannot be used with this model or cache; None if it can."""
    if any(size % DEPTH for size in (config.hidden_size, config.query_size, config.intermediate_size)):
        return f"sizes must be multiples of {DEPTH}"
    if block_size % TILE or config.head_dim % DEPTH:
        return f"blocks must be multiples of {TILE} tokens, heads of {DEPTH} numbers"
    return None


class CompiledKernels:
    """The kernels of one family."""

    def __init__(
        self,
        threads: ThreadPool,
        *,
        int8_weights: bool = False,
        are_grouped: bool = False,
        cores: CoreShare | None = None,
        kept: Kept = in_own_memory,
    ) -> None:
        """`are_grouped`: all weights will be GroupedWeight. `cores`: a step has as many threads as it gives; None: all.
        `kept`: where packed weights are kept."""
        self._threads = threads
        self._cores = cores
        self.linears: MakesLinears = PackedLinears(PackedInt8 if int8_weights else PackedBf16, threads, kept)
        family = threads.family
        # Products of grouped weights are the same everywhere; families in vector registers differ in nothing else.
        is_common = are_grouped and family.products is not Products.TILES
        self.arithmetic = GENERIC.arithmetic if is_common else family.arithmetic
        self.label = threads.family.label
        self.shares_cores = cores is not None

    def forward(self, model: LlamaModel, config: LlamaConfig, cache: KvCache) -> CompiledForward:
        return CompiledForward(model, config, cache, self._threads, self._cores)


def checked_threads(wanted: str, config: AttentionConfig, on_progress: OnProgress) -> ThreadPool | None:
    """Threads that run the kernel family named `wanted`, or for "auto" the fastest of this machine. None if there is no
    such family, or if it computes wrong results; `on_progress` is called with the reason."""
    family = choose_family(wanted, on_progress)
    if family is None:
        return None
    if config.head_dim % family.head_step:
        reason = f"{family.label} needs heads of a multiple of {family.head_step} numbers"
        others = [other for other in runnable_families() if config.head_dim % other.head_step == 0]
        if wanted != "auto" or not others:
            on_progress(reason)
            return None
        family = others[0]
        on_progress(f"{reason}: {family.label} computes")
    on_progress(f"compiled kernels for {family.label} (some seconds when they are compiled first)")
    threads = ThreadPool(family)
    reason = why_wrong(threads, config)
    if reason is None:
        return threads
    on_progress(f"{family.label} kernels are left out: {reason}")
    slower = [other for other in runnable_families() if other.rank > family.rank] if wanted == "auto" else []
    return checked_threads(slower[0].name, config, on_progress) if slower else None


class CompiledForward:
    """Computes with the weights of a model whose linear layers were built by PackedLinears."""

    multiplies_single_rows = False

    def __init__(
        self,
        model: LlamaModel,
        config: LlamaConfig,
        cache: KvCache,
        threads: ThreadPool,
        cores: CoreShare | None = None,
    ) -> None:
        self._cores = cores
        self._model, self._config, self._cache, self._threads = model, config, cache, threads
        self._attention = CompiledAttention(config, cache, threads)
        self.plan = self._attention.plan
        self._grow(_ROWS_STEP)

    def adapter(self, weights: LoraWeights) -> PackedAdapter:
        return PackedAdapter(weights, len(self._model.layers))

    def logits(
        self,
        token_ids: list[int],
        positions: list[int],
        logit_rows: list[int],
        plan: CompiledPlan,
        adapters: Sequence[PackedAdapter | None] | None = None,
    ) -> torch.Tensor:
        if len(token_ids) > self._max_rows:
            self._grow(len(token_ids))
        inputs = [np.array(numbers, np.int64) for numbers in (token_ids, positions, logit_rows)]
        tokens, places, wanted = (numbers.ctypes.data for numbers in inputs)
        logits = torch.empty(len(logit_rows), _packed(self._model.head).num_columns)
        if adapters is None:
            own = self._program
        else:
            if self._adapted_program is None:
                self._adapted_program = self._make_program(is_adapted=True)
            own = self._adapted_program
            inputs.append(np.array([0 if adapter is None else adapter.address for adapter in adapters], np.int64))
            own.tasks[own.adaptations, INPUT] = inputs[-1].ctypes.data
        tasks = own.tasks
        tasks[: own.first_of_head, ROWS] = len(token_ids)
        tasks[own.first_of_head :, ROWS] = len(logit_rows)
        tasks[0, INPUT] = tokens
        tasks[own.rotations, INPUT] = places
        tasks[own.rotations, INPUT + 1] = plan.slots.ctypes.data
        tasks[own.attentions, INPUT] = plan.words.ctypes.data
        tasks[own.first_of_head, INPUT] = wanted
        tasks[-1, INPUT] = logits.data_ptr()
        if self._cores is None:
            self._threads.run(tasks)
        else:
            self._threads.run(tasks, self._cores.begin())
            self._cores.end()
        return logits[:, : self._config.vocab_size]

    def hidden_states(self, first_row: int, num_rows: int) -> torch.Tensor:
        return self._model.hidden_states(self._space.x[first_row : first_row + num_rows])

    def _grow(self, num_rows: int) -> None:
        """Make room for `num_rows` rows."""
        model, num_rows = self._model, -(-num_rows // _ROWS_STEP) * _ROWS_STEP
        self._max_rows = 0  # if memory does not suffice, the next step tries to grow again
        self._space = _Workspace(model, self._config, num_rows)
        self._program = self._make_program(is_adapted=False)
        self._adapted_program: _Program | None = None
        """For steps in which sequences have adapters; made when it is first needed."""
        self._max_rows = num_rows

    def _make_program(self, *, is_adapted: bool) -> _Program:
        model, space = self._model, self._space
        adapted = AdaptedTasks(self._config, space.num_rows, self._threads.num_threads) if is_adapted else None
        tasks = [self._look_up_task()]
        for index, layer in enumerate(model.layers):
            tasks += self._layer_tasks(index, layer, adapted)
        first_of_head = len(tasks)
        tasks.append(self._norm_task(space.x, model.norm))
        tasks += _packed(model.head).tasks(0, FLOATS, space.operands(space.normalised, None))
        array = program(tasks)
        rotations, attentions, adaptations = (
            np.flatnonzero(array[:, KIND] == kind) for kind in (ROTATE, ATTEND, ADAPT)
        )
        return _Program(array, first_of_head, rotations, attentions, adaptations, adapted)

    def _look_up_task(self) -> list[int]:
        embedding, out = self._model.embedding, self._space.x.data_ptr()
        if embedding is not None:
            return task(LOOK_UP, 0, 0, embedding.data_ptr(), self._config.hidden_size, out)
        return _packed(self._model.head).look_up_task(0, 0, out)

    def _layer_tasks(self, index: int, layer: DecoderLayer, adapted: AdaptedTasks | None) -> list[list[int]]:
        config, space = self._config, self._space
        qkv, x = space.qkv.data_ptr(), space.x
        tasks = [self._norm_task(x, layer.attention_norm)]
        tasks += _packed(layer.qkv).tasks(0, ROUNDED, space.operands(space.normalised, space.qkv))
        if adapted is not None:
            sizes = config.query_size, config.kv_size, config.kv_size
            tasks += adapted.tasks(index, ("q_proj", "k_proj", "v_proj"), sizes, space.normalised, space.qkv)
        if layer.query_key_norms is not None:
            sizes = config.query_size, config.kv_size, config.head_dim
            weights = (weight.data_ptr() for weight in layer.query_key_norms)
            tasks.append(task(HEAD_NORMS, 0, qkv, *weights, *sizes, float_bits(config.rms_norm_eps)))
        table = self._model.cos.data_ptr(), self._model.sin.data_ptr()
        tasks.append(self._attention.store_task(0, index, qkv, config.query_size, *table))
        tasks.append(self._attention.task(0, index, qkv, space.qkv.shape[1], space.attended.data_ptr()))
        tasks += _packed(layer.attention_output).tasks(0, ADDED, space.operands(space.attended, x, x))
        if adapted is not None:
            tasks += adapted.tasks(index, ("o_proj",), (config.hidden_size,), space.attended, x)
        tasks.append(self._norm_task(x, layer.mlp_norm))
        gated = _packed(layer.gated)
        if adapted is None:
            tasks += gated.tasks(0, GATED, space.operands(space.normalised, space.gated))
        else:
            tasks += gated.tasks(0, FLOATS, space.operands(space.normalised, adapted.factors))
            tasks += adapted.gated_tasks(index, space.normalised, space.gated)
        tasks += _packed(layer.down).tasks(0, ADDED, space.operands(space.gated, x, x))
        if adapted is not None:
            tasks += adapted.tasks(index, ("down_proj",), (config.hidden_size,), space.gated, x)
        return tasks

    def _norm_task(self, x: torch.Tensor, weight: torch.Tensor) -> list[int]:
        addresses = x.data_ptr(), self._space.normalised.data_ptr(), weight.data_ptr()
        return task(NORM, 0, 0, *addresses, self._config.hidden_size, float_bits(self._config.rms_norm_eps))

    def is_invariant(self) -> bool:
        def make(config: LlamaConfig, cache: KvCache) -> CompiledAttention:
            return CompiledAttention(config, cache, self._threads)

        depths = {_packed(product).depth for product in self._model.distinct_products}
        return rows_are_independent(self._threads, depths) and attention_is_invariant(
            self._config, self._cache.dtype, self._cache.block_size, make
        )


class _Program(NamedTuple):
    tasks: np.ndarray[Any, Any]
    first_of_head: int
    rotations: np.ndarray[Any, Any]
    attentions: np.ndarray[Any, Any]
    adaptations: np.ndarray[Any, Any]
    """The places of the tasks whose inputs differ from step to step."""
    adapted: AdaptedTasks | None
    """Keeps the memory of the tasks for adapters."""


class _Workspace:
    """The intermediate results of tasks: bf16 [rows, ..], reused by every layer."""

    def __init__(self, model: LlamaModel, config: LlamaConfig, num_rows: int) -> None:
        def new(columns: int) -> torch.Tensor:
            return torch.empty(num_rows, columns, dtype=torch.bfloat16)

        self.num_rows = num_rows
        self.x = new(config.hidden_size)
        self.normalised = new(config.hidden_size)
        self.qkv = new(config.query_size + 2 * config.kv_size)
        self.attended = new(config.query_size)
        self.gated = new(config.intermediate_size)
        depth = max(_packed(product).depth for product in model.distinct_products)
        self._prepared = torch.empty(num_rows, depth * PREPARED_BYTES, dtype=torch.uint8)
        self._row_scales = torch.empty(num_rows)

    def operands(self, x: torch.Tensor, out: torch.Tensor | None, other: torch.Tensor | None = None) -> Operands:
        """`out` is None if it differs from step to step."""
        rows = self._prepared.data_ptr(), self._row_scales.data_ptr()
        return Operands(
            x.data_ptr(), 0 if out is None else out.data_ptr(), *rows, 0 if other is None else other.data_ptr()
        )


def _packed(product: Product) -> PackedWeights:
    assert isinstance(product, PackedLinear | PackedGated)
    return product.weights
