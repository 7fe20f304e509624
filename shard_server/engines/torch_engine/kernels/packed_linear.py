"""Linear layers of compiled kernels: how weights are packed and multiplied.

A row's bits do not depend on how many other rows are computed with it, so products may be of any size. Threads share
the columns.
"""

from __future__ import annotations

import torch

from shard_server.engines.torch_engine.grouped_weight import AnyWeight, GroupedWeight, joined_rows
from shard_server.engines.torch_engine.kernels.codegen.tasks import program
from shard_server.engines.torch_engine.kernels.packed_groups import PackedGroups
from shard_server.engines.torch_engine.kernels.packed_weights import (
    Kept,
    Operands,
    PackedBf16,
    PackedInt8,
    PackedWeights,
    in_own_memory,
)
from shard_server.engines.torch_engine.kernels.products.outputs import ADDED, FLOATS, GATED, ROUNDED, TILE
from shard_server.engines.torch_engine.kernels.thread_pool import ThreadPool
from shard_server.engines.torch_engine.operators.linear import Weight

_NOTHING = torch.empty(0)


class PackedLinear:
    """All methods take bf16 [rows, in_features] and compute a single product. CompiledForward uses `weights`."""

    is_whole = True

    def __init__(self, weights: PackedWeights, in_features: int, out_features: int, threads: ThreadPool) -> None:
        self.in_features, self.out_features = in_features, out_features
        self.weights = weights
        self.weight_rows = weights.weight_rows
        self._threads = threads

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """xW + b, bf16"""
        return self._whole(multiply(self._threads, self.weights, x, ROUNDED, self._new_out(x))).contiguous()

    def floats(self, x: torch.Tensor) -> torch.Tensor:
        """xW + b, float32"""
        return self._whole(multiply(self._threads, self.weights, x, FLOATS, self._new_out(x, torch.float32)))

    def add(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """xW + b + other, bf16"""
        if self.out_features != self.weights.num_columns:
            return self(x).add_(other)
        return multiply(self._threads, self.weights, x, ADDED, self._new_out(x), other.contiguous())

    def _new_out(self, x: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(len(x), self.weights.num_columns, dtype=dtype)

    def _whole(self, out: torch.Tensor) -> torch.Tensor:
        """Remove the padding columns."""
        return out if out.shape[1] == self.out_features else out[:, : self.out_features]


class PackedGated:
    """silu(gate(x)) * up(x)"""

    is_whole = True

    def __init__(self, weights: PackedWeights, in_features: int, threads: ThreadPool) -> None:
        """`weights` holds the columns of gate and up, interleaved 16 by 16."""
        self.in_features = in_features
        self.weights = weights
        self._threads = threads

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(x), self.weights.num_columns // 2, dtype=torch.bfloat16)
        return multiply(self._threads, self.weights, x, GATED, out)


class PackedLinears:
    """Builds a model's linear layers."""

    def __init__(self, pack: type[PackedBf16 | PackedInt8], threads: ThreadPool, kept: Kept = in_own_memory) -> None:
        self._pack = pack
        self._threads = threads
        self._kept = kept

    def linear(self, weight: AnyWeight, bias: torch.Tensor | None) -> PackedLinear:
        out_features, in_features = weight.shape
        return PackedLinear(self._packed(weight, bias), in_features, out_features, self._threads)

    def gated(self, gate: Weight, up: Weight) -> PackedGated:
        weight = _interleaved(gate[0], up[0])
        bias = None if gate[1] is None or up[1] is None else _interleaved_tiles(gate[1], up[1])
        return PackedGated(self._packed(weight, bias), weight.shape[1], self._threads)

    def _packed(self, weight: AnyWeight, bias: torch.Tensor | None) -> PackedWeights:
        pack = PackedGroups if isinstance(weight, GroupedWeight) else self._pack
        return pack(weight, bias, self._threads, self._kept)  # pyrefly: ignore[bad-argument-type]


def multiply(
    threads: ThreadPool,
    weights: PackedWeights,
    x: torch.Tensor,
    kind: int,
    out: torch.Tensor,
    other: torch.Tensor = _NOTHING,
) -> torch.Tensor:
    """Compute one product into `out` and return it."""
    x = x.contiguous()
    prepared, row_scales = torch.empty(len(x), weights.depth), torch.empty(len(x))
    operands = Operands(*(tensor.data_ptr() for tensor in (x, out, prepared, row_scales, other)))
    threads.run(program(weights.tasks(len(x), kind, operands)))
    return out


def _interleaved(gate: AnyWeight, up: AnyWeight) -> AnyWeight:
    """Alternate the tiles of both, so that factors of one another are computed together."""
    weight = joined_rows([gate, up])
    if not isinstance(weight, GroupedWeight):
        return _interleaved_tiles(*weight.chunk(2))
    minima = None if weight.minima is None else _interleaved_tiles(*weight.minima.chunk(2))
    words, scales = (_interleaved_tiles(*part.chunk(2)) for part in (weight.words, weight.scales))
    return GroupedWeight(weight.bits, words, scales, minima)


def _interleaved_tiles(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.stack([part.unflatten(0, (-1, TILE)) for part in (gate, up)], 1).flatten(0, 2)
