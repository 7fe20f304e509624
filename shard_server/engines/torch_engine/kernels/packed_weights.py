"""Weights of compiled linear layers in the order in which they are read, and the tasks of their products."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F  # noqa: N812

from shard_server.engines.torch_engine.kernels.codegen.tasks import (
    INT8_PRODUCT,
    LOOK_UP_IN_HEAD,
    LOOK_UP_IN_INT8_HEAD,
    PREPARE,
    PRODUCT,
    SPLIT,
    program,
    task,
)
from shard_server.engines.torch_engine.kernels.families import Products
from shard_server.engines.torch_engine.kernels.products.dots import OFFSET as DIGIT_OFFSET
from shard_server.engines.torch_engine.kernels.products.outputs import PANEL, TILE
from shard_server.engines.torch_engine.kernels.thread_pool import ThreadPool
from shard_server.engines.torch_engine.operators.int8_linear import quantise_rows
from shard_server.engines.torch_engine.operators.linear import LookUp

DEPTH = 32
"""The sums of bf16 products are padded to a multiple of this."""
_INT8_DEPTH = 64
PREPARED_BYTES = 4
"""Prepared rows take so many bytes of memory for each number of a row."""

Kept = Callable[[torch.Tensor], torch.Tensor]
"""Returns a tensor of the same contents, from where it is kept (shared_weights.py)."""


def in_own_memory(packed: torch.Tensor) -> torch.Tensor:
    return packed


class Operands(NamedTuple):
    """The addresses that differ from product to product. All arrays are contiguous."""

    x: int
    """bf16 [rows, in_features]"""
    out: int
    """[rows, columns], of the type that belongs to the product's kind; see outputs.ROUNDED"""
    prepared: int
    """[rows, depth] of PREPARED_BYTES: the rows as the product needs them, if not as they are"""
    row_scales: int
    """float32 [rows]: the scales of rows that were split into digits"""
    other: int = 0
    """The array that is added; may be `out`"""


class PackedWeights(Protocol):
    """A layer's weights in the order in which they are read."""

    depth: int
    """in_features, padded"""
    num_columns: int
    """A multiple of 32"""
    weight_rows: LookUp | None
    """See Linear.weight_rows."""

    def look_up_task(self, num_rows: int, indices: int, out: int) -> list[int]:
        """The task of `weight_rows`: int64 `indices` [rows], bf16 `out` [rows, in_features]; both are addresses."""
        ...

    def tasks(self, num_rows: int, kind: int, operands: Operands) -> list[list[int]]:
        """The tasks of one product."""
        ...


class PackedBf16:
    """In words of two numbers that are multiplied together: for every 32 columns, for every 16 words of the sum, two
    tiles of [16 words, 16 columns]."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, threads: ThreadPool, kept: Kept = in_own_memory
    ) -> None:
        self._in_features = weight.shape[1]
        weight = _padded(weight, DEPTH)
        self._threads = threads
        self.depth = weight.shape[1]
        self._weight = kept(_in_tiles(weight.view(torch.int32)).view(torch.bfloat16))
        self.num_columns = len(weight)
        self._bias = padded_floats(bias, self.num_columns)
        self.weight_rows: LookUp | None = self._rows

    def tasks(self, num_rows: int, kind: int, operands: Operands) -> list[list[int]]:
        layer = self._threads.scratches, self.depth, self.num_columns, kind, operands.other
        tensors = self._bias.data_ptr(), self._weight.data_ptr()
        if self._threads.family.products is Products.TILES:
            return [task(PRODUCT, num_rows, operands.out, *layer, *tensors, operands.x)]
        return [
            task(PREPARE, num_rows, operands.x, self._in_features, self.depth, operands.prepared),
            task(PRODUCT, num_rows, operands.out, *layer, *tensors, operands.prepared),
        ]

    def look_up_task(self, num_rows: int, indices: int, out: int) -> list[int]:
        return task(LOOK_UP_IN_HEAD, num_rows, indices, self._weight.data_ptr(), self.depth, self.num_columns, out)

    def _rows(self, indices: torch.Tensor) -> torch.Tensor:
        return looked_up(self._threads, self, indices, self.depth)


class PackedInt8:
    """int8 weights with a scale per column.

    Where integers are multiplied: in words of four numbers that are multiplied together; rows are split into two int8
    digits, see int8_linear.py. Where they are widened to float32: in the order of the sum, for every 32 columns [depth,
    32 columns].
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, threads: ThreadPool, kept: Kept = in_own_memory
    ) -> None:
        self._in_features = weight.shape[1]
        self.weight_rows: LookUp | None = self._rows
        values, scales = quantise_rows(weight)
        values = _padded(values, _INT8_DEPTH)
        self._threads = threads
        self.depth = values.shape[1]
        self.num_columns = len(values)
        if threads.family.products is Products.FLOATS:
            self._weight = kept(values.unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous())
        else:
            self._weight = kept(_in_tiles(values.view(torch.int32)))
        self._scales = padded_floats(scales.flatten(), self.num_columns)
        self._bias = padded_floats(bias, self.num_columns)
        self._corrections: torch.Tensor | None = None
        """The part that the offset of unsigned digits adds to a column's sums, negated; None where digits are
        signed."""
        if threads.family.products is Products.DOTS:
            self._corrections = values.sum(1, dtype=torch.int32).mul_(-DIGIT_OFFSET)

    def tasks(self, num_rows: int, kind: int, operands: Operands) -> list[list[int]]:
        layer = self._threads.scratches, self.depth, self.num_columns, kind, operands.other
        tensors = self._bias.data_ptr(), self._weight.data_ptr()
        scales, sizes = self._scales.data_ptr(), (self._in_features, self.depth)
        if self._threads.family.products is Products.FLOATS:
            return [
                task(PREPARE, num_rows, operands.x, *sizes, operands.prepared),
                task(INT8_PRODUCT, num_rows, operands.out, *layer, *tensors, operands.prepared, scales),
            ]
        rows = operands.prepared, operands.row_scales
        columns = (scales,) if self._corrections is None else (scales, self._corrections.data_ptr())
        return [
            task(SPLIT, num_rows, operands.x, *sizes, *rows),
            task(INT8_PRODUCT, num_rows, operands.out, *layer, *tensors, *rows, *columns),
        ]

    def look_up_task(self, num_rows: int, indices: int, out: int) -> list[int]:
        word_size = 1 if self._threads.family.products is Products.FLOATS else 4
        sizes = self.depth, self.num_columns, self._in_features
        tensors = self._scales.data_ptr(), out
        return task(LOOK_UP_IN_INT8_HEAD, num_rows, indices, self._weight.data_ptr(), *sizes, *tensors, word_size)

    def _rows(self, indices: torch.Tensor) -> torch.Tensor:
        return looked_up(self._threads, self, indices, self._in_features)


def looked_up(threads: ThreadPool, weights: PackedWeights, indices: torch.Tensor, size: int) -> torch.Tensor:
    """See Linear.weight_rows."""
    rows = torch.empty(len(indices), size, dtype=torch.bfloat16)
    threads.run(program([weights.look_up_task(len(indices), indices.data_ptr(), rows.data_ptr())]))
    return rows


def _in_tiles(words: torch.Tensor) -> torch.Tensor:
    """int32 [columns, words of the sum] → [..]: for every 32 columns, 16 words: two tiles of 16 columns each"""
    num_columns, num_words = words.shape
    tiles = words.reshape(num_columns // PANEL, PANEL // TILE, TILE, num_words // TILE, TILE)
    return tiles.permute(0, 3, 1, 4, 2).flatten()


def _padded(weight: torch.Tensor, depth: int) -> torch.Tensor:
    """Pad with zeros to a multiple of `depth` and of 32 columns."""
    missing = -weight.shape[0] % PANEL, -weight.shape[1] % depth
    # `pad` would copy even without padding.
    return (F.pad(weight, (0, missing[1], 0, missing[0])) if any(missing) else weight).contiguous()


def padded_floats(values: torch.Tensor | None, size: int) -> torch.Tensor:
    padded = torch.zeros(size)
    if values is not None:
        padded[: len(values)] = values
    return padded
