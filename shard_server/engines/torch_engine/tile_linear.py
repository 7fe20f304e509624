"""Linear layers of bf16 weights through AMX tiles (tile_matmul.py): how weights are packed, and who computes what.

A row's bits do not depend on how many other rows are computed with it, so products may be of any size. Threads share
the columns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shard_server.engines.torch_engine.amx import request_amx
from shard_server.engines.torch_engine.config import LlamaConfig
from shard_server.engines.torch_engine.linear import Weight
from shard_server.engines.torch_engine.team import ThreadTeam
from shard_server.engines.torch_engine.tile_matmul import (
    ADDED,
    DEPTH,
    FLOATS,
    GATED,
    PANEL,
    ROUNDED,
    TILE,
    multiply,
    new_scratch,
    take_columns,
)

_NOTHING = np.zeros(TILE, np.uint16)


class TileLinear:
    """All methods take bf16 [rows, in_features]; out_features may be any number, in_features a multiple of 32."""

    is_whole = True

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, products: TileProducts) -> None:
        self.out_features, self.in_features = weight.shape
        self._products = products
        missing = -self.out_features % PANEL
        # Pairs of numbers that are multiplied together are a word.
        words = torch.nn.functional.pad(weight, (0, 0, 0, missing)).contiguous().view(torch.int32)
        self._num_columns = len(words)
        tiles = words.reshape(-1, PANEL // TILE, TILE, self.in_features // DEPTH, DEPTH // 2)
        self._weight = tiles.permute(0, 3, 1, 4, 2).contiguous().view(torch.uint16).numpy().reshape(-1)
        self._bias = np.zeros(self._num_columns, np.float32)
        if bias is not None:
            self._bias[: self.out_features] = bias.float().numpy()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """xW + b, bf16"""
        return self.compute(x, ROUNDED, self._num_columns)[:, : self.out_features].contiguous()

    def floats(self, x: torch.Tensor) -> torch.Tensor:
        """xW + b, float32"""
        return self.compute(x, FLOATS, self._num_columns, torch.float32)[:, : self.out_features]

    def add(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """xW + b + other, bf16"""
        if self.out_features != self._num_columns:
            return self(x).add_(other)
        return self.compute(x, ADDED, self._num_columns, other=_bits(other))

    def weight_rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Those of the weight as it was given, bf16 [len(indices), in_features]."""
        rows = torch.empty(len(indices), self.in_features, dtype=torch.bfloat16)
        take_columns(self._weight.view(np.uint32), indices.numpy(), rows.view(torch.int32).numpy().view(np.uint32))
        return rows

    def compute(
        self,
        x: torch.Tensor,
        kind: int,
        num_columns: int,
        dtype: torch.dtype = torch.bfloat16,
        other: np.ndarray[Any, Any] = _NOTHING,
    ) -> torch.Tensor:
        """[rows, num_columns] of `kind` (see tile_matmul.py)"""
        out = torch.empty(len(x), num_columns, dtype=dtype)
        if len(x):
            self._products.compute(_bits(x), self.in_features, self._weight, self._bias, kind, other, _bits(out))
        return out


class _TileGated:
    is_whole = True

    def __init__(self, gate_and_up: TileLinear) -> None:
        self.in_features = gate_and_up.in_features
        self._gate_and_up = gate_and_up

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._gate_and_up.compute(x, GATED, self._gate_and_up.out_features // 2)


class TileProducts:
    """The threads that multiply, and what each needs."""

    def __init__(self) -> None:
        self._team = ThreadTeam()
        self._scratches = [new_scratch() for _ in range(self._team.num_threads)]

    def compute(
        self,
        x: np.ndarray[Any, Any],
        depth: int,
        weight: np.ndarray[Any, Any],
        bias: np.ndarray[Any, Any],
        kind: int,
        other: np.ndarray[Any, Any],
        out: np.ndarray[Any, Any],
    ) -> None:
        """See tile_matmul.multiply."""
        num_panels = bias.size // PANEL
        num_parts = min(len(self._scratches), num_panels)

        def multiply_part(index: int) -> None:
            first, end = num_panels * index // num_parts, num_panels * (index + 1) // num_parts
            multiply(x, depth, weight, bias, first, end, kind, other, out, self._scratches[index])

        self._team.run(multiply_part, num_parts)


class TileLinears:
    """Makes a model's linear layers."""

    def __init__(self) -> None:
        self._products = TileProducts()

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> TileLinear:
        return TileLinear(weight, bias, self._products)

    def gated(self, gate: Weight, up: Weight) -> _TileGated:
        weight = _interleaved(gate[0], up[0])
        bias = None if gate[1] is None or up[1] is None else _interleaved(gate[1], up[1])
        return _TileGated(TileLinear(weight, bias, self._products))


def why_not_tiles(config: LlamaConfig, dtype: torch.dtype) -> str | None:
    """What keeps TileLinears from this model or machine; None: nothing."""
    if dtype != torch.bfloat16:
        return "they are for bfloat16"
    if any(size % DEPTH for size in (config.hidden_size, config.query_size, config.intermediate_size)):
        return f"sizes must be multiples of {DEPTH}"
    return None if request_amx() else "this CPU has no AMX"


def _interleaved(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """A tile's columns of each in turns, so that what is multiplied with one another is computed together."""
    parts = [part.unflatten(0, (-1, TILE)) for part in (gate, up)]
    return torch.stack(parts, 1).flatten(0, 2)


def _bits(x: torch.Tensor) -> np.ndarray[Any, Any]:
    return x.contiguous().view(torch.uint16).numpy().reshape(-1)
