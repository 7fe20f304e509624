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
    take_columns,
)
from shard_server.engines.torch_engine.tile_matmul_int8 import INT8_DEPTH, split_rows
from shard_server.engines.torch_engine.tile_tasks import (
    multiply_int8_part,
    multiply_part,
    new_scratches,
    thread_function,
)

_NOTHING = torch.empty(0)

_Array = np.ndarray[Any, Any]


class TileTeam:
    """The threads that multiply, and what they need for it."""

    def __init__(self) -> None:
        self._team = ThreadTeam()
        self._scratches = new_scratches(self._team.num_threads)
        self._common = (self._team.num_threads, self._scratches.ctypes.data)

    def compute(self, kind: str, part: Callable[[_Array, int], None], *task: int) -> None:
        """A task of tile_tasks.py, but for its first two numbers: `part` computes it, `kind` says so to threads."""
        words = np.array(self._common + task, np.int64)
        if self._team.num_threads == 1:
            part(words, 0)
        else:
            self._team.run_compiled(thread_function(kind), words.ctypes.data)


class Tiles(Protocol):
    """Packed weights."""

    num_columns: int
    """A multiple of 32"""
    weight_rows: LookUp | None

    def multiply(self, x: torch.Tensor, kind: int, other: torch.Tensor, out: torch.Tensor) -> None:
        """`x`: bf16 [at least one row, depth]; all are contiguous; the rest: see tile_matmul.multiply."""
        ...


class Bf16Tiles:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, team: TileTeam) -> None:
        weight = _padded(weight, DEPTH)
        self._team = team
        self._depth = weight.shape[1]
        # Pairs of numbers that are multiplied together are a word.
        self._weight = _packed(weight.view(torch.int32)).view(torch.bfloat16)
        self.num_columns = len(weight)
        self._bias = _floats(bias, self.num_columns)
        self.weight_rows: LookUp | None = self._rows

    def multiply(self, x: torch.Tensor, kind: int, other: torch.Tensor, out: torch.Tensor) -> None:
        sizes = len(x), self._depth, self.num_columns, kind, out.nbytes // 2
        addresses = (tensor.data_ptr() for tensor in (other, out, self._bias, self._weight, x))
        self._team.compute("bf16", multiply_part, *sizes, *addresses, 0, 0)

    def _rows(self, indices: torch.Tensor) -> torch.Tensor:
        rows = torch.empty(len(indices), self._depth, dtype=torch.bfloat16)
        take_columns(self._weight.view(torch.uint32).numpy(), indices.numpy(), rows.view(torch.uint32).numpy())
        return rows


class Int8Tiles:
    """With a scale per column. Rows are split into two digits of the weights' kind, see int8_linear.py."""

    weight_rows: LookUp | None = None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, team: TileTeam) -> None:
        values, scales = quantise_rows(weight)
        values = _padded(values, INT8_DEPTH)
        self._team = team
        self._depth = values.shape[1]
        self._weight = _packed(values.view(torch.int32))
        self.num_columns = len(values)
        self._scales = _floats(scales.flatten(), self.num_columns)
        self._bias = _floats(bias, self.num_columns)

    def multiply(self, x: torch.Tensor, kind: int, other: torch.Tensor, out: torch.Tensor) -> None:
        # Zeros, since what is behind a row's end is multiplied too.
        make = torch.zeros if self._depth > x.shape[1] else torch.empty
        digits, row_scales = make(2, len(x), self._depth, dtype=torch.int8), torch.empty(len(x))
        split_rows(x.view(torch.uint16).numpy(), digits.numpy(), row_scales.numpy())
        sizes = len(x), self._depth, self.num_columns, kind, out.nbytes // 2
        tensors = (other, out, self._bias, self._weight, digits, row_scales, self._scales)
        self._team.compute("int8", multiply_int8_part, *sizes, *(tensor.data_ptr() for tensor in tensors))


class TileLinear:
    """All methods take bf16 [rows, in_features]."""

    is_whole = True

    def __init__(self, tiles: Tiles, in_features: int, out_features: int) -> None:
        self.in_features, self.out_features = in_features, out_features
        self._tiles = tiles
        self.weight_rows = tiles.weight_rows

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """xW + b, bf16"""
        return self._whole(self._compute(x, ROUNDED)).contiguous()

    def floats(self, x: torch.Tensor) -> torch.Tensor:
        """xW + b, float32"""
        return self._whole(self._compute(x, FLOATS, torch.float32))

    def add(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """xW + b + other, bf16"""
        if self.out_features != self._tiles.num_columns:
            return self(x).add_(other)
        return self._compute(x, ADDED, other=other.contiguous())

    def _compute(
        self, x: torch.Tensor, kind: int, dtype: torch.dtype = torch.bfloat16, other: torch.Tensor = _NOTHING
    ) -> torch.Tensor:
        out = torch.empty(len(x), self._tiles.num_columns, dtype=dtype)
        if len(x):
            self._tiles.multiply(x.contiguous(), kind, other, out)
        return out

    def _whole(self, out: torch.Tensor) -> torch.Tensor:
        """Without the columns that were added."""
        return out if out.shape[1] == self.out_features else out[:, : self.out_features]


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
            self._tiles.multiply(x.contiguous(), GATED, _NOTHING, out)
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
    missing = -weight.shape[0] % PANEL, -weight.shape[1] % depth
    # Without padding `pad` copies, too.
    return (F.pad(weight, (0, missing[1], 0, missing[0])) if any(missing) else weight).contiguous()


def _floats(values: torch.Tensor | None, size: int) -> torch.Tensor:
    padded = torch.zeros(size)
    if values is not None:
        padded[: len(values)] = values
    return padded


def _in_turns(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """A tile's columns of each, so that what is multiplied with one another is computed together."""
    return torch.stack([part.unflatten(0, (-1, TILE)) for part in (gate, up)], 1).flatten(0, 2)
