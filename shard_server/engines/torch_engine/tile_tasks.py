"""Products of tile_matmul.py and tile_matmul_int8.py as tasks that threads share without the interpreter.

A task is an array of int64: addresses and sizes. To make arrays of Python's of them, and to enter the interpreter in
every thread, costs more than the product of a row that decodes.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import llvmlite.binding
import numpy as np
from numba import cfunc, types
from numba.np.numpy_support import carray

from shard_server.engines.torch_engine.amx import aligned_zeros, tile_configuration
from shard_server.engines.torch_engine.compiled import bf16_at, bytes_at, floats_at, int8_at, jit
from shard_server.engines.torch_engine.tile_matmul import PANEL, Scratch, multiply
from shard_server.engines.torch_engine.tile_matmul_int8 import multiply_int8

_TASK_SIZE = 14
_SUMS = PANEL * PANEL
_CONFIGURATION_BYTES = 64
_SCRATCH_BYTES = 2 * 4 * _SUMS + 3 * _CONFIGURATION_BYTES


def new_scratches(num_parts: int) -> np.ndarray[Any, Any]:
    """uint8, for tile_matmul.Scratch of each part"""
    scratches = aligned_zeros(num_parts * _SCRATCH_BYTES, np.uint8)
    for configurations in scratches.reshape(num_parts, -1)[:, 2 * 4 * _SUMS :]:
        configurations.reshape(3, -1)[:2] = tile_configuration()
    return scratches


@jit()
def _scratch_at(address: Any) -> Any:
    configurations = address + 2 * 4 * _SUMS
    return Scratch(
        carray(floats_at(address), (_SUMS,)),
        carray(floats_at(address + 4 * _SUMS), (_SUMS,)),
        carray(bytes_at(configurations), (_CONFIGURATION_BYTES,)),
        carray(bytes_at(configurations + _CONFIGURATION_BYTES), (_CONFIGURATION_BYTES,)),
        carray(bytes_at(configurations + 2 * _CONFIGURATION_BYTES), (_CONFIGURATION_BYTES,)),
    )


@jit(inline=True)
def _common(task: Any) -> Any:
    """Numbers of every task: parts, address of the scratches, rows, depth, columns, kind, numbers in `out`."""
    return task[0], task[1], task[2], task[3], task[4], task[5], task[6]


@jit()
def multiply_part(task: Any, part: Any) -> None:
    """`task`: of `Bf16Tiles.multiply`."""
    num_parts, scratches, num_rows, depth, num_columns, kind, out_size = _common(task)
    other, out, bias, weights, x = task[7], task[8], task[9], task[10], task[11]
    panels = num_columns // PANEL
    multiply(
        carray(bf16_at(x), (num_rows * depth,)),
        depth,
        carray(bf16_at(weights), (num_columns * depth,)),
        carray(floats_at(bias), (num_columns,)),
        panels * part // num_parts,
        panels * (part + 1) // num_parts,
        kind,
        carray(bf16_at(other), (out_size,)),
        carray(bf16_at(out), (out_size,)),
        _scratch_at(scratches + part * _SCRATCH_BYTES),
    )


@jit()
def multiply_int8_part(task: Any, part: Any) -> None:
    """`task`: of `Int8Tiles.multiply`."""
    num_parts, scratches, num_rows, depth, num_columns, kind, out_size = _common(task)
    other, out, bias, weights = task[7], task[8], task[9], task[10]
    digits, row_scales, scales = task[11], task[12], task[13]
    panels = num_columns // PANEL
    multiply_int8(
        carray(int8_at(digits), (2 * num_rows * depth,)),
        carray(floats_at(row_scales), (num_rows,)),
        depth,
        carray(int8_at(weights), (num_columns * depth,)),
        carray(floats_at(scales), (num_columns,)),
        carray(floats_at(bias), (num_columns,)),
        panels * part // num_parts,
        panels * (part + 1) // num_parts,
        kind,
        carray(bf16_at(other), (out_size,)),
        carray(bf16_at(out), (out_size,)),
        _scratch_at(scratches + part * _SCRATCH_BYTES),
    )


@functools.cache
def thread_function(kind: str) -> int:
    """Address of what each of OpenMP's threads calls with the address of a task: it computes every so many parts, from
    its own number on. `kind`: "bf16" or "int8"."""
    thread, num_threads = (_openmp_function(name) for name in ("omp_get_thread_num", "omp_get_num_threads"))
    compute = multiply_part if kind == "bf16" else multiply_int8_part

    @cfunc(types.void(types.CPointer(types.int64)))
    def work(data: Any) -> None:
        task = carray(data, (_TASK_SIZE,))
        for part in range(thread(), task[0], num_threads()):
            compute(task, part)

    _kept.append(work)
    return int(work.address or 0)


def _openmp_function(name: str) -> Any:
    # torch has brought it; LLVM may not see it.
    llvmlite.binding.add_symbol(name, ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value)
    return types.ExternalFunction(name, types.int32())


_kept: list[Any] = []
"""Code is freed with what it was compiled from."""
