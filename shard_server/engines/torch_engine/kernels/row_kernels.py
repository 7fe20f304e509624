"""The operations between the matrix products, row by row, for bf16: each is a single pass over the row.

torch needs some ten operators for the same, whose calls cost more than the arithmetic of a decode step. Numbers are
rounded to bf16 where torch rounds them. Tasks are defined in tasks.py; threads share the rows. Each docstring lists the
arguments of its task.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.np.numpy_support import carray

from shard_server.engines.torch_engine.kernels.attention.attend import store
from shard_server.engines.torch_engine.kernels.attention.scratch import TILE
from shard_server.engines.torch_engine.kernels.codegen.compiled import (
    bf16_at,
    bf16_of_float,
    float_of_bf16,
    float_of_bits,
    floats_at,
    integers_at,
    jit,
)
from shard_server.engines.torch_engine.kernels.codegen.tasks import ROWS, share
from shard_server.engines.torch_engine.kernels.codegen.vector_ops import rounding_ops, sum_of_squares

_layer_norm = rounding_ops(native=False).layer_norm


@jit()
def look_up_rows(task: Any, part: Any, num_parts: Any) -> None:
    """indices (int64 [rows]), weight (bf16 [.., columns]), columns, out (bf16 [rows, columns])"""
    indices, weight, num_columns, out = task[3], task[4], task[5], task[6]
    places = carray(integers_at(indices), (task[ROWS],))
    first, end = share(task[ROWS], part, num_parts)
    for row in range(first, end):
        source = carray(bf16_at(weight + places[row] * num_columns * 2), (num_columns,))
        _copy(carray(bf16_at(out + row * num_columns * 2), (num_columns,)), source)


@jit()
def normalise_rows(task: Any, part: Any, num_parts: Any) -> None:
    """indices (int64 [rows] of `x`, or 0: in order), x and out (bf16 [rows, columns]), weight (bf16 [columns]),
    columns, epsilon: root-mean-square norm, scaled by the weight"""
    indices, x, out, weight, num_columns, epsilon = task[3], task[4], task[5], task[6], task[7], _float(task[8])
    places = carray(integers_at(indices), (task[ROWS],))
    weights = carray(bf16_at(weight), (num_columns,))
    first, end = share(task[ROWS], part, num_parts)
    for row in range(first, end):
        source = places[row] if indices else row
        numbers = carray(bf16_at(x + source * num_columns * 2), (num_columns,))
        _normalise(numbers, weights, epsilon, carray(bf16_at(out + row * num_columns * 2), (num_columns,)))


@jit()
def layer_normalise_rows(task: Any, part: Any, num_parts: Any) -> None:
    """numbers and others (float32 [rows, columns]; others may be 0), weight and bias (float32 [columns]), columns,
    epsilon, out (bf16 [rows, columns]): numbers + others less their mean, in units of their standard deviation, scaled
    by the weight, plus the bias; in place and rounded"""
    numbers, others, weight, bias, num_columns, epsilon = task[3], task[4], task[5], task[6], task[7], _float(task[8])
    weights, biases = carray(floats_at(weight), (num_columns,)), carray(floats_at(bias), (num_columns,))
    first, end = share(task[ROWS], part, num_parts)
    for row in range(first, end):
        own = carray(floats_at(numbers + row * num_columns * 4), (num_columns,))
        if others:
            _add(own, carray(floats_at(others + row * num_columns * 4), (num_columns,)))
        _layer_norm(own, weights, biases, epsilon, carray(bf16_at(task[9] + row * num_columns * 2), (num_columns,)))


@jit()
def normalise_heads(task: Any, part: Any, num_parts: Any) -> None:
    """qkv (bf16 [rows, query_size + 2 * kv_size], in place), weights of queries and of keys (bf16 [head_dim]),
    query_size, kv_size, head_dim, epsilon"""
    qkv, query_weight, key_weight, query_size, kv_size, dim = task[3], task[4], task[5], task[6], task[7], task[8]
    epsilon = _float(task[9])
    query_weights, key_weights = carray(bf16_at(query_weight), (dim,)), carray(bf16_at(key_weight), (dim,))
    first, end = share(task[ROWS], part, num_parts)
    for row in range(first, end):
        for column in range(0, query_size + kv_size, dim):
            head = carray(bf16_at(qkv + (row * (query_size + 2 * kv_size) + column) * 2), (dim,))
            _normalise(head, query_weights if column < query_size else key_weights, epsilon, head)


@jit()
def rotate_and_store_rows(task: Any, part: Any, num_parts: Any) -> None:
    """positions (int64 [rows]), slots (int64 [rows], see KvCache), qkv (bf16 [rows, query_size + 2 * kv_size]), cos and
    sin (see rope.rotation_table), query_size, kv_size, head_dim, pool (of a KvCache), block_size, layers, layer:
    queries and keys are rotated in place, keys and values stored (see tile_kernels.store) among the layer's own"""
    positions, slots, qkv, cos, sin = task[3], task[4], task[5], task[6], task[7]
    query_size, kv_size, dim, pool = task[8], task[9], task[10], task[11]
    block_size, num_layers, layer = task[12], task[13], task[14]
    num_rows, row_size = task[ROWS], query_size + 2 * kv_size
    row_positions, row_slots = carray(integers_at(positions), (num_rows,)), carray(integers_at(slots), (num_rows,))
    first, end = share(num_rows, part, num_parts)
    for row in range(first, end):
        numbers = carray(bf16_at(qkv + row * row_size * 2), (row_size,))
        angles = row_positions[row] * dim * 4
        row_cos, row_sin = carray(floats_at(cos + angles), (dim,)), carray(floats_at(sin + angles), (dim,))
        for start in range(0, query_size + kv_size, dim):
            middle = start + dim // 2
            _rotate(numbers[start:middle], numbers[middle : start + dim], row_cos, row_sin)
        block, offset = row_slots[row] // block_size, row_slots[row] % block_size
        place = (block * num_layers + layer) * block_size + offset
        tile = (place - place % TILE) * 2 * kv_size
        store(carray(bf16_at(pool + tile * 2), (TILE * 2 * kv_size,)), place % TILE, numbers[query_size:])


@jit(inline=True)
def _float(bits: Any) -> Any:
    return float_of_bits(np.uint32(bits))


@jit()
def _normalise(x: Any, weight: Any, epsilon: Any, out: Any) -> None:
    mean = sum_of_squares(x, 0, x.size) / np.float32(x.size)
    factor = np.float32(1) / np.sqrt(mean + epsilon)
    _scale(x, weight, factor, out)


@jit()
def _scale(x: Any, weight: Any, factor: Any, out: Any) -> None:
    for column in range(x.size):
        out[column] = bf16_of_float(float_of_bf16(x[column]) * factor * float_of_bf16(weight[column]))


@jit()
def _rotate(lower: Any, upper: Any, cos: Any, sin: Any) -> None:
    """Rotates in place. Product and sum are rounded separately, as in rope.rotate_."""
    for index in range(lower.size):
        low, high = float_of_bf16(lower[index]), float_of_bf16(upper[index])
        lower[index] = bf16_of_float(low * cos[index] + high * sin[index])
        upper[index] = bf16_of_float(high * cos[lower.size + index] + low * sin[lower.size + index])


@jit()
def _add(target: Any, source: Any) -> None:
    for index in range(target.size):
        target[index] += source[index]


@jit()
def _copy(target: Any, source: Any) -> None:
    for index in range(target.size):
        target[index] = source[index]
