"""The tasks by which adapters take part in a program of compiled code; see adapter_rows.py for what they compute."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from shard_server.engines.torch_engine.config import LlamaConfig
from shard_server.engines.torch_engine.kernels.adapter_rows import ENTRY_SIZE
from shard_server.engines.torch_engine.kernels.codegen.tasks import ADAPT, GATE, task
from shard_server.engines.torch_engine.kernels.products.outputs import TILE
from shard_server.engines.torch_engine.lora.peft import MODULES, LoraWeights


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
