"""Linear layers through AMX tiles (tile_matmul.py, tile_matmul_int8.py): how weights are packed, and who computes what.

A row's bits do not depend on how many other rows are computed with it, so products may be of any size. Threads share
the columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from shard_server.engines.torch_engine.amx import request_amx
from shard_server.engines.torch_engine.config import LlamaConfig
from shard_server.engines.torch_engine.int8_linear import quantise_rows
from shard_server.engines.torch_engine.linear import LookUp, Weight
from shard_server.engines.torch_engine.team import ThreadTeam
from shard_server.engines.torch_engine.tile_matmul import (
    ADDED,
    DEPTH,
    FLOATS,
    GATED,
    PANEL,
    ROUNDED,
    TILE,
    Scratch,
    multiply,
    new_scratch,
    take_columns,
)
from shard_server.engines.torch_engine.tile_matmul_int8 import INT8_DEPTH, multiply_int8, split_rows

_NOTHING = np.zeros(TILE, np.uint16)

_Array = np.ndarray[Any, Any]


class TileTeam:
    """The threads that multiply, and what each needs."""

    def __init__(self) -> None:
        self._team = ThreadTeam()
        self._scratches = [new_scratch() for _ in range(self._team.num_threads)]

    def share(self, num_columns: int, task: Callable[[int, int, Scratch], None]) -> None:
        """task(first panel, end, scratch) in every thread."""
        num_panels = num_columns // PANEL
        num_parts = min(len(self._scratches), num_panels)
        if num_parts == 1:
            task(0, num_panels, self._scratches[0])
            return

        def part(index: int) -> None:
            first, end = num_panels * index // num_parts, num_panels * (index + 1) // num_parts
            task(first, end, self._scratches[index])

        self._team.run(part, num_parts)


class Tiles(Protocol):
    """Packed weights."""

    num_columns: int
    """A multiple of 32"""
    weight_rows: LookUp | None

    def multiply(self, x: torch.Tensor, kind: int, other: _Array, out: _Array) -> None:
        """`x`: bf16 [at least one row, depth]; the rest: see tile_matmul.multiply."""
        ...


class Bf16Tiles:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, team: TileTeam) -> None:
        weight = _padded(weight, DEPTH)
        self._team = team
        self._depth = weight.shape[1]
        # Pairs of numbers that are multiplied together are a word.
        self._weight = _packed(weight.view(torch.int32)).view(torch.uint16).numpy()
        self.num_columns = len(weight)
        self._bias = _floats(bias, self.num_columns)
        self.weight_rows: LookUp | None = self._rows

    def multiply(self, x: torch.Tensor, kind: int, other: _Array, out: _Array) -> None:
        rows = _bits(x)

        def task(first_panel: int, end_panel: int, scratch: Scratch) -> None:
            multiply(rows, self._depth, self._weight, self._bias, first_panel, end_panel, kind, other, out, scratch)

        self._team.share(self.num_columns, task)

    def _rows(self, indices: torch.Tensor) -> torch.Tensor:
        rows = torch.empty(len(indices), self._depth, dtype=torch.bfloat16)
        take_columns(self._weight.view(np.uint32), indices.numpy(), rows.view(torch.uint32).numpy())
        return rows


class Int8Tiles:
    """With a scale per column. Rows are split into two digits of the weights' kind, see int8_linear.py."""

    weight_rows: LookUp | None = None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, team: TileTeam) -> None:
        values, scales = quantise_rows(weight)
        values = _padded(values, INT8_DEPTH)
        self._team = team
        self._depth = values.shape[1]
        self._weight = _packed(values.view(torch.int32)).view(torch.int8).numpy()
        self.num_columns = len(values)
        self._scales = _floats(scales.flatten(), self.num_columns)
        self._bias = _floats(bias, self.num_columns)

    def multiply(self, x: torch.Tensor, kind: int, other: _Array, out: _Array) -> None:
        # Zeros, since what is behind a row's end is multiplied too.
        digits = torch.zeros(2, len(x), self._depth, dtype=torch.int8).numpy()
        scales = np.empty(len(x), np.float32)
        split_rows(x.view(torch.uint16).numpy(), digits, scales)
        rows = digits.reshape(-1)

        def task(first_panel: int, end_panel: int, scratch: Scratch) -> None:
            weight = (self._depth, self._weight, self._scales, self._bias)
            multiply_int8(rows, scales, *weight, first_panel, end_panel, kind, other, out, scratch)

        self._team.share(self.num_columns, task)


class TileLinear:
    """All methods take bf16 [rows, in_features]."""

    is_whole = True

    def __init__(self, tiles: Tiles, in_features: int, out_features: int) -> None:
        self.in_features, self.out_features = in_features, out_features
        self._tiles = tiles
        self.weight_rows = tiles.weight_rows

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """xW + b, bf16"""
        return self._compute(x, ROUNDED)[:, : self.out_features].contiguous()

    def floats(self, x: torch.Tensor) -> torch.Tensor:
        """xW + b, float32"""
        return self._compute(x, FLOATS, torch.float32)[:, : self.out_features]

    def add(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """xW + b + other, bf16"""
        if self.out_features != self._tiles.num_columns:
            return self(x).add_(other)
        return self._compute(x, ADDED, other=_bits(other))

    def _compute(
        self, x: torch.Tensor, kind: int, dtype: torch.dtype = torch.bfloat16, other: _Array = _NOTHING
    ) -> torch.Tensor:
        out = torch.empty(len(x), self._tiles.num_columns, dtype=dtype)
        if len(x):
            self._tiles.multiply(x, kind, other, _bits(out))
        return out


class TileGated:
    """silu(gate(x)) * up(x)"""

    is_whole = True

    def __init__(self, tiles: Tiles, in_features: int) -> None:
        """`tiles`: a tile's columns of each in turns."""
        self.in_features = in_features
        self._tiles = tiles

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(x), self._tiles.num_columns // 2, dtype=torch.bfloat16)
        if len(x):
            self._tiles.multiply(x, GATED, _NOTHING, _bits(out))
        return out


class TileLinears:
    """Makes a model's linear layers."""

    def __init__(self, make_tiles: type[Bf16Tiles | Int8Tiles]) -> None:
        self._make_tiles = make_tiles
        self._team = TileTeam()

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> TileLinear:
        out_features, in_features = weight.shape
        return TileLinear(self._make_tiles(weight, bias, self._team), in_features, out_features)

    def gated(self, gate: Weight, up: Weight) -> TileGated:
        weight = _in_turns(gate[0], up[0])
        bias = None if gate[1] is None or up[1] is None else _in_turns(gate[1], up[1])
        return TileGated(self._make_tiles(weight, bias, self._team), weight.shape[1])


def why_not_tiles(config: LlamaConfig, dtype: torch.dtype) -> str | None:
    """What keeps TileLinears from this model or machine; None: nothing."""
    if dtype != torch.bfloat16:
        return "they are for bfloat16"
    if any(size % DEPTH for size in (config.hidden_size, config.query_size, config.intermediate_size)):
        return f"sizes must be multiples of {DEPTH}"
    return None if request_amx() else "this CPU has no AMX"


def _packed(words: torch.Tensor) -> torch.Tensor:
    """int32 [columns, words of the sum] → [..]: for every 32 columns, 16 words: two tiles of 16 columns each"""
    num_columns, num_words = words.shape
    tiles = words.reshape(num_columns // PANEL, PANEL // TILE, TILE, num_words // TILE, TILE)
    return tiles.permute(0, 3, 1, 4, 2).flatten()


def _padded(weight: torch.Tensor, depth: int) -> torch.Tensor:
    """With zeros, to a multiple of `depth` and of 32 columns."""
    num_columns, num_summed = weight.shape
    return F.pad(weight, (0, -num_summed % depth, 0, -num_columns % PANEL)).contiguous()


def _floats(values: torch.Tensor | None, size: int) -> _Array:
    padded = np.zeros(size, np.float32)
    if values is not None:
        padded[: len(values)] = values.float().numpy()
    return padded


def _in_turns(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """A tile's columns of each, so that what is multiplied with one another is computed together."""
    return torch.stack([part.unflatten(0, (-1, TILE)) for part in (gate, up)], 1).flatten(0, 2)


def _bits(x: torch.Tensor) -> _Array:
    return x.contiguous().view(torch.uint16).numpy().reshape(-1)
