"""Linear layers on AMX tiles (tile_matmul.py, tile_matmul_int8.py): how weights are packed and multiplied.

A row's bits do not depend on how many other rows are computed with it, so products may be of any size. Threads share
the columns.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F  # noqa: N812

from shard_server.engines.torch_engine.kernels.int8_linear import quantise_rows
from shard_server.engines.torch_engine.kernels.tasks import (
    INT8_PRODUCT,
    LOOK_UP_IN_TILES,
    PRODUCT,
    SPLIT,
    program,
    task,
)
from shard_server.engines.torch_engine.kernels.thread_pool import ThreadPool
from shard_server.engines.torch_engine.kernels.tile_matmul import ADDED, DEPTH, FLOATS, GATED, PANEL, ROUNDED, TILE
from shard_server.engines.torch_engine.kernels.tile_matmul_int8 import INT8_DEPTH
from shard_server.engines.torch_engine.linear import LookUp, Weight

_NOTHING = torch.empty(0)


class Operands(NamedTuple):
    """The addresses that differ from product to product. All arrays are contiguous."""

    x: int
    """bf16 [rows, in_features]"""
    out: int
    """[rows, columns], of the type that belongs to the product's kind; see tile_matmul.ROUNDED"""
    digits: int
    """int8 [2, rows, depth]: the rows split into digits, for int8 weights"""
    row_scales: int
    """float32 [rows]: the scales of the digits"""
    other: int = 0
    """The array that is added; may be `out`"""


class Tiles(Protocol):
    """Packed weights."""

    depth: int
    """in_features, padded"""
    num_columns: int
    """A multiple of 32"""
    weight_rows: LookUp | None
    """See Linear.weight_rows."""

    def tasks(self, num_rows: int, kind: int, operands: Operands) -> list[list[int]]:
        """The tasks of one product."""
        ...


class Bf16Tiles:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, threads: ThreadPool) -> None:
        weight = _padded(weight, DEPTH)
        self._threads = threads
        self.depth = weight.shape[1]
        # Two numbers that are multiplied together form a word.
        self._weight = _packed(weight.view(torch.int32)).view(torch.bfloat16)
        self.num_columns = len(weight)
        self._bias = _floats(bias, self.num_columns)
        self.weight_rows: LookUp | None = self._rows

    def tasks(self, num_rows: int, kind: int, operands: Operands) -> list[list[int]]:
        layer = self._threads.scratches, self.depth, self.num_columns, kind, operands.other
        tensors = self._bias.data_ptr(), self._weight.data_ptr()
        return [task(PRODUCT, num_rows, operands.out, *layer, *tensors, operands.x)]

    def look_up_task(self, num_rows: int, indices: int, out: int) -> list[int]:
        """Look up columns of the original weights: bf16 `out` [rows, depth], int64 `indices` [rows]; both are
        addresses."""
        return task(LOOK_UP_IN_TILES, num_rows, indices, self._weight.data_ptr(), self.depth, self.num_columns, out)

    def _rows(self, indices: torch.Tensor) -> torch.Tensor:
        rows = torch.empty(len(indices), self.depth, dtype=torch.bfloat16)
        self._threads.run(program([self.look_up_task(len(indices), indices.data_ptr(), rows.data_ptr())]))
        return rows


class Int8Tiles:
    """int8 weights with a scale per column. Rows are split into two int8 digits; see int8_linear.py."""

    weight_rows: LookUp | None = None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, threads: ThreadPool) -> None:
        self._in_features = weight.shape[1]
        values, scales = quantise_rows(weight)
        values = _padded(values, INT8_DEPTH)
        self._threads = threads
        self.depth = values.shape[1]
        self._weight = _packed(values.view(torch.int32))
        self.num_columns = len(values)
        self._scales = _floats(scales.flatten(), self.num_columns)
        self._bias = _floats(bias, self.num_columns)

    def tasks(self, num_rows: int, kind: int, operands: Operands) -> list[list[int]]:
        layer = self._threads.scratches, self.depth, self.num_columns, kind, operands.other
        tensors = self._bias.data_ptr(), self._weight.data_ptr()
        rows = operands.digits, operands.row_scales
        return [
            task(SPLIT, num_rows, operands.x, self._in_features, self.depth, *rows),
            task(INT8_PRODUCT, num_rows, operands.out, *layer, *tensors, *rows, self._scales.data_ptr()),
        ]


class TileLinear:
    """All methods take bf16 [rows, in_features] and compute a single product; CompiledForward uses `tiles` directly."""

    is_whole = True

    def __init__(self, tiles: Tiles, in_features: int, out_features: int, threads: ThreadPool) -> None:
        self.in_features, self.out_features = in_features, out_features
        self.tiles = tiles
        self.weight_rows = tiles.weight_rows
        self._threads = threads

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """xW + b, bf16"""
        return self._whole(multiply(self._threads, self.tiles, x, ROUNDED, self._new_out(x))).contiguous()

    def floats(self, x: torch.Tensor) -> torch.Tensor:
        """xW + b, float32"""
        return self._whole(multiply(self._threads, self.tiles, x, FLOATS, self._new_out(x, torch.float32)))

    def add(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """xW + b + other, bf16"""
        if self.out_features != self.tiles.num_columns:
            return self(x).add_(other)
        return multiply(self._threads, self.tiles, x, ADDED, self._new_out(x), other.contiguous())

    def _new_out(self, x: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(len(x), self.tiles.num_columns, dtype=dtype)

    def _whole(self, out: torch.Tensor) -> torch.Tensor:
        """Remove the padding columns."""
        return out if out.shape[1] == self.out_features else out[:, : self.out_features]


class TileGated:
    """silu(gate(x)) * up(x)"""

    is_whole = True

    def __init__(self, tiles: Tiles, in_features: int, threads: ThreadPool) -> None:
        """`tiles` holds the columns of gate and up, interleaved tile by tile."""
        self.in_features = in_features
        self.tiles = tiles
        self._threads = threads

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(x), self.tiles.num_columns // 2, dtype=torch.bfloat16)
        return multiply(self._threads, self.tiles, x, GATED, out)


class TileLinears:
    """Builds a model's linear layers."""

    def __init__(self, make_tiles: type[Bf16Tiles | Int8Tiles], threads: ThreadPool) -> None:
        self._make_tiles = make_tiles
        self._threads = threads

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> TileLinear:
        out_features, in_features = weight.shape
        return TileLinear(self._make_tiles(weight, bias, self._threads), in_features, out_features, self._threads)

    def gated(self, gate: Weight, up: Weight) -> TileGated:
        weight = _interleaved(gate[0], up[0])
        bias = None if gate[1] is None or up[1] is None else _interleaved(gate[1], up[1])
        return TileGated(self._make_tiles(weight, bias, self._threads), weight.shape[1], self._threads)


def multiply(
    threads: ThreadPool, tiles: Tiles, x: torch.Tensor, kind: int, out: torch.Tensor, other: torch.Tensor = _NOTHING
) -> torch.Tensor:
    """Compute one product into `out` and return it."""
    x = x.contiguous()
    digits, row_scales = torch.empty(2, len(x), tiles.depth, dtype=torch.int8), torch.empty(len(x))
    operands = Operands(*(tensor.data_ptr() for tensor in (x, out, digits, row_scales, other)))
    threads.run(program(tiles.tasks(len(x), kind, operands)))
    return out


def _packed(words: torch.Tensor) -> torch.Tensor:
    """int32 [columns, words of the sum] → [..]: for every 32 columns, 16 words: two tiles of 16 columns each"""
    num_columns, num_words = words.shape
    tiles = words.reshape(num_columns // PANEL, PANEL // TILE, TILE, num_words // TILE, TILE)
    return tiles.permute(0, 3, 1, 4, 2).flatten()


def _padded(weight: torch.Tensor, depth: int) -> torch.Tensor:
    """Pad with zeros to a multiple of `depth` and of 32 columns."""
    missing = -weight.shape[0] % PANEL, -weight.shape[1] % depth
    # `pad` would copy even without padding.
    return (F.pad(weight, (0, missing[1], 0, missing[0])) if any(missing) else weight).contiguous()


def _floats(values: torch.Tensor | None, size: int) -> torch.Tensor:
    padded = torch.zeros(size)
    if values is not None:
        padded[: len(values)] = values
    return padded


def _interleaved(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Alternate the tiles of both, so that factors of one another are computed together."""
    return torch.stack([part.unflatten(0, (-1, TILE)) for part in (gate, up)], 1).flatten(0, 2)
