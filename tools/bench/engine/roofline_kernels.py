"""Compiled loops that reach the limits of one thread: reading memory, and float32 multiply-adds in vector registers.
Importing this module raises ImportError where there is no numba or no such instruction."""

from __future__ import annotations

from typing import Any, Final

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from shard_server.engines.torch_engine.kernels.codegen import llvm
from shard_server.engines.torch_engine.kernels.codegen.cpu import features, has_fma, is_arm64

_NUM_CHAINS: Final = 12
"""Independent sums: more than the 8 that are in flight on two units of 4 cycles, and fewer than 16 registers."""


def _num_lanes() -> int:
    """The float32 numbers in the widest vector register of the CPU that the kernels are compiled for."""
    if is_arm64():
        return 4
    if not has_fma():
        raise ImportError("this CPU has no instruction that multiplies and adds")
    return 16 if "avx512f" in features() else 8


_LANES: Final = _num_lanes()
OPERATIONS_PER_ITERATION: Final = 2 * _NUM_CHAINS * _LANES
"""The operations of one iteration of `multiply_add`."""


@llvm.intrinsic
def _multiply_add_chains(_typing: Any, _iterations: Any, _factor: Any) -> Any:
    """`iterations` times: each of _NUM_CHAINS vectors = vector * factor + factor. Returns a number that depends on all
    of them, so that none can be left out."""
    vector = ir.VectorType(ir.FloatType(), _LANES)

    def generate(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        iterations, factor = args
        factors = llvm.spread(builder, factor, _LANES)
        sums = [
            cgutils.alloca_once_value(builder, llvm.constant(vector, float(number))) for number in range(_NUM_CHAINS)
        ]
        with cgutils.for_range(builder, iterations):
            for chain in sums:
                builder.store(llvm.multiply_add(builder, builder.load(chain), factors, factors), chain)
        total = builder.load(sums[0])
        for chain in sums[1:]:
            total = builder.fadd(total, builder.load(chain))
        return builder.extract_element(total, ir.Constant(ir.IntType(32), 0))

    return types.float32(types.int64, types.float32), generate


@numba.njit(nogil=True)
def multiply_add(num_iterations: Any) -> Any:
    """Run OPERATIONS_PER_ITERATION float32 operations `num_iterations` times."""
    return _multiply_add_chains(np.int64(num_iterations), np.float32(0.5))


@numba.njit(nogil=True)
def sum_words(words: Any) -> Any:
    """The sum of an int64 array, which needs few instructions per byte."""
    total = np.int64(0)
    for word in words:
        total += word
    return total
