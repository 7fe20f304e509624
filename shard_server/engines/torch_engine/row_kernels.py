"""What is computed row by row between the matrix products, for bf16: each a single pass over the row.

torch does the same in some ten operators, whose calls cost more than the arithmetic of a decode step. Numbers are
rounded to bf16 where torch rounds them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba.np.numpy_support import carray

from shard_server.engines.torch_engine.compiled import bf16_at, bf16_of_float, copy, float_of_bf16, jit


def normalised(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Root-mean-square norm of bf16 `x` [rows, columns], scaled by `weight` [columns]."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _normalise(x.data_ptr(), weight.data_ptr(), len(x), x.shape[1], epsilon, out.data_ptr())
    return out


def rotate_and_store(
    qkv: torch.Tensor,
    token_rows: torch.Tensor,
    *,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    query_size: int,
    pool: torch.Tensor,
) -> None:
    """Rotate the queries and keys in `qkv` [rows, query_size + 2 * kv_size], and copy keys and values of the first rows
    to `token_rows` (int64 [tokens]) of `pool` [.., 2 * kv_size].

    `cos` and `sin`: see rope.rotation_table. `positions`: int64 [rows].
    """
    _rotate_and_store(
        _bits(qkv), positions.numpy(), cos.numpy(), sin.numpy(), query_size, token_rows.numpy(), _bits(pool)
    )


def _bits(x: torch.Tensor) -> np.ndarray[Any, Any]:
    return x.view(torch.uint16).numpy()


@jit()
def _normalise(x: Any, weight: Any, num_rows: Any, num_columns: Any, epsilon: Any, out: Any) -> None:
    """`x`, `weight` and `out` are addresses."""
    weights = carray(bf16_at(weight), (num_columns,))
    for row in range(num_rows):
        first = row * num_columns * 2
        numbers = carray(bf16_at(x + first), (num_columns,))
        mean = _sum_of_squares(numbers) / np.float32(num_columns)
        factor = np.float32(1) / np.sqrt(mean + np.float32(epsilon))
        _scale(numbers, weights, factor, carray(bf16_at(out + first), (num_columns,)))


@jit("reassoc", "contract", "nsz")
def _sum_of_squares(x: Any) -> Any:
    """In whatever order is fast, the same for every row."""
    total = np.float32(0)
    for column in range(x.size):
        value = float_of_bf16(x[column])
        total += value * value
    return total


@jit()
def _scale(x: Any, weight: Any, factor: Any, out: Any) -> None:
    for column in range(x.size):
        out[column] = bf16_of_float(float_of_bf16(x[column]) * factor * float_of_bf16(weight[column]))


@jit()
def _rotate_and_store(
    qkv: Any, positions: Any, cos: Any, sin: Any, query_size: Any, token_rows: Any, pool: Any
) -> None:
    dim, kv_size = cos.shape[1], pool.shape[1] // 2
    for row in range(qkv.shape[0]):
        row_cos, row_sin = cos[positions[row]], sin[positions[row]]
        for first in range(0, query_size + kv_size, dim):
            middle = first + dim // 2
            _rotate(qkv[row, first:middle], qkv[row, middle : first + dim], row_cos, row_sin)
    for row in range(token_rows.size):
        copy(pool[token_rows[row]], qkv[row, query_size:])


@jit()
def _rotate(lower: Any, upper: Any, cos: Any, sin: Any) -> None:
    """As in rope.rotate_, product and sum rounded apart."""
    for index in range(lower.size):
        low, high = float_of_bf16(lower[index]), float_of_bf16(upper[index])
        lower[index] = bf16_of_float(low * cos[index] + high * sin[index])
        upper[index] = bf16_of_float(high * cos[lower.size + index] + low * sin[lower.size + index])
