"""Look-up of single columns in packed weights: the rows of an embedding that is also the head."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.np.numpy_support import carray

from shard_server.engines.torch_engine.kernels.codegen.compiled import (
    bf16_at,
    bf16_of_float,
    floats_at,
    int8_at,
    integers_at,
    jit,
    words_at,
)
from shard_server.engines.torch_engine.kernels.codegen.tasks import ROWS, share
from shard_server.engines.torch_engine.kernels.products.outputs import PANEL, TILE

_TILE_WORDS = 256


@jit()
def look_up_columns(task: Any, part: Any, num_parts: Any) -> None:
    """indices (int64 [rows]), weights (packed bf16), depth, columns, out (bf16 [rows, depth]): columns of weights"""
    indices, weights, half, num_columns, out = task[3], task[4], task[5] // 2, task[6], task[7]
    columns = carray(integers_at(indices), (task[ROWS],))
    words = carray(words_at(weights), (num_columns * half,))
    first, end = share(task[ROWS], part, num_parts)
    for row in range(first, end):
        _take_column(words, columns[row], carray(words_at(out + row * half * 4), (half,)))


@jit()
def _take_column(weights: Any, column: Any, out: Any) -> None:
    """One column of the weights, in words (uint32) of two numbers: [depth / 2]"""
    half = out.size
    first = column // PANEL * PANEL * half + column % PANEL // TILE * _TILE_WORDS + column % TILE
    for pair in range(half):
        out[pair] = weights[first + pair // TILE * 2 * _TILE_WORDS + pair % TILE * TILE]


@jit()
def look_up_int8_columns(task: Any, part: Any, num_parts: Any) -> None:
    """indices (int64 [rows]), weights (packed int8), padded depth, columns, depth, scales (float32 [columns]), out
    (bf16 [rows, depth]), word size: the numbers of a column that lie side by side, 1 or 4"""
    indices, weights, padded_depth, num_columns, depth = task[3], task[4], task[5], task[6], task[7]
    scales, out, word_size = task[8], task[9], task[10]
    columns = carray(integers_at(indices), (task[ROWS],))
    numbers = carray(int8_at(weights), (num_columns * padded_depth,))
    column_scales = carray(floats_at(scales), (num_columns,))
    first, end = share(task[ROWS], part, num_parts)
    for row in range(first, end):
        column = columns[row]
        target = carray(bf16_at(out + row * depth * 2), (depth,))
        _take_int8_column(numbers, column, padded_depth, word_size, column_scales[column], target)


@jit()
def _take_int8_column(numbers: Any, column: Any, padded_depth: Any, word_size: Any, scale: Any, out: Any) -> None:
    panel = column // PANEL * PANEL * padded_depth
    for place in range(out.size):
        if word_size == 1:  # [padded depth, 32 columns]
            index = panel + place * PANEL + column % PANEL
        else:  # tiles of [16 words, 16 columns], two side by side
            word = place // word_size
            tile = word // TILE * 2 + column % PANEL // TILE
            index = panel + ((tile * TILE + word % TILE) * TILE + column % TILE) * word_size + place % word_size
        out[place] = bf16_of_float(np.float32(numbers[index]) * scale)
