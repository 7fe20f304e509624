"""Code that the compiled kernels share: compiler options, and bf16 numbers, which numba does not support.

The kernels are compiled into one entry point (program.py), whose code is cached until a source of this package changes.

No kernel may reorder the sums of a row in a way that depends on other rows. Reordering within a row is allowed, since
the code is the same for every row of every batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from shard_server.engines.torch_engine.kernels.codegen.llvm import address, integer, intrinsic, prefetch_line

_Function = Callable[..., Any]


def jit(*, inline: bool = False, variant: object = "") -> Callable[[_Function], _Function]:
    """Compile for this CPU, without the interpreter's lock.

    A function that another function makes needs a `variant` that is different for every such function: it becomes part
    of the name of the compiled code, and of equal names the process uses whichever it has loaded first.
    """
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    if inline:
        options["inline"] = "always"

    def compiled(function: _Function) -> _Function:
        if variant:
            function.__qualname__ += f".{variant}"
        return numba.njit(**options)(function)

    return compiled


def _bitcast(source: types.Type, target: types.Type, target_ir: ir.Type) -> Any:
    @intrinsic
    def cast(_typing: Any, _value: Any) -> Any:
        def generate(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], target_ir)

        return target(source), generate

    return cast


float_of_bits = _bitcast(types.uint32, types.float32, ir.FloatType())
_bits_of_float = _bitcast(types.float32, types.uint32, ir.IntType(32))


def _pointer_to(number: types.Type) -> Any:
    @intrinsic
    def pointer(_typing: Any, _address: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(number)(types.int64), generate

    return pointer


# For `carray`: in Python, an address costs a tenth of the time of a numpy array over a tensor.
bytes_at, int8_at, bf16_at, words_at, integers_at, floats_at = (
    _pointer_to(number) for number in (types.uint8, types.int8, types.uint16, types.uint32, types.int64, types.float32)
)

# numba computes with 64-bit integers by default; each step is explicitly 32-bit, so that vectors hold twice as many.


@jit(inline=True)
def float_of_bf16(bits: Any) -> Any:
    return float_of_bits(np.uint32(np.uint32(bits) << np.uint32(16)))


@jit(inline=True)
def bf16_of_float(value: Any) -> Any:
    """The nearest bf16 number, ties to even. NaN is not handled."""
    bits = _bits_of_float(value)
    odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    return np.uint16(np.uint32(np.uint32(bits + np.uint32(0x7FFF)) + odd) >> np.uint32(16))


def aligned_zeros(size: int, dtype: type) -> np.ndarray[Any, Any]:
    """Zeros that begin at a cache line, since a tile's row is one: unaligned products take three times as long. Zeros,
    because products also read parts that were never written, which must not be NaN."""
    num_bytes = size * np.dtype(dtype).itemsize
    raw = np.zeros(num_bytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + num_bytes].view(dtype)


@intrinsic
def prefetch(_typing: Any, array: Any, first: Any, num_bytes: Any) -> Any:
    """Prefetch `num_bytes` from `array[first]` on into the L2 cache."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        array, first, num_bytes = args
        start = address(context, builder, signature.args[0], array, first, ir.IntType(8))
        with cgutils.for_range_slice(builder, integer(0), num_bytes, integer(64)) as (offset, _):
            prefetch_line(builder, builder.gep(start, [offset]))
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64), generate
