"""Intel's matrix tiles (AMX) for compiled kernels: eight registers of 16 rows of 64 bytes, and their products.

`tile_dot(c, a, b)` adds to the float32 [16, 16] in c the product of bf16 [16, 32] in a and [32, 16] in b; b's rows 2i
and 2i+1 lie in one row of the register as pairs. Every sum runs in the order of the 32, in float32, whatever the other
rows and columns hold: so rows have the same bits in any batch.

The register numbers are part of the instructions, so they must be literals. oneDNN uses the same registers with a
configuration of its own, which a kernel restores when it ends.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic as _intrinsic

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_BYTES = _I8.as_pointer()
intrinsic: Any = _intrinsic
"""numba's decorator; its result has one parameter less than the function, which type checkers cannot infer."""
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18


def request_amx() -> bool:
    """Whether this CPU has AMX, for bf16 and int8, and Linux lets this process use it."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    features = llvmlite.binding.get_host_cpu_features()
    if not all(features.get(name) for name in ("amx-tile", "amx-bf16", "amx-int8")):
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0


def aligned_zeros(size: int, dtype: type) -> np.ndarray[Any, Any]:
    """Zeros that begin at a cache line, since a tile's row is one: unaligned products take three times as long. Zeros,
    because products also read parts that were never written, which must not be NaN."""
    num_bytes = size * np.dtype(dtype).itemsize
    raw = np.zeros(num_bytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + num_bytes].view(dtype)


def tile_configuration() -> np.ndarray[Any, Any]:
    """uint8 [64]: a configuration in which all eight registers have 16 rows of 64 bytes."""
    configuration = np.zeros(64, np.uint8)
    configuration[0] = 1
    configuration[16:32:2] = 64
    configuration[48:56] = 16
    return configuration


@intrinsic
def load_tile_configuration(_typing: Any, array: Any) -> Any:
    return types.void(array), _with_address("ldtilecfg")


@intrinsic
def store_tile_configuration(_typing: Any, array: Any) -> Any:
    return types.void(array), _with_address("sttilecfg")


@intrinsic
def tile_zero(_typing: Any, register: Any) -> Any:
    return _on_registers("tilezero", register)


@intrinsic
def tile_dot(_typing: Any, c: Any, a: Any, b: Any) -> Any:
    return _on_registers("tdpbf16ps", c, a, b)


@intrinsic
def tile_dot_int8(_typing: Any, c: Any, a: Any, b: Any) -> Any:
    """Like `tile_dot`, for int8 [16, 64] and [64, 16], of which the register holds four rows in one; exact in int32."""
    return _on_registers("tdpbssd", c, a, b)


@intrinsic
def tile_load(_typing: Any, register: Any, array: Any, first: Any, stride_bytes: Any) -> Any:
    """Load or store 16 rows, the first from element `first` of `array` on."""
    return _on_memory("tileloadd64", register, array)


@intrinsic
def tile_store(_typing: Any, register: Any, array: Any, first: Any, stride_bytes: Any) -> Any:
    return _on_memory("tilestored64", register, array)


@intrinsic
def prefetch(_typing: Any, array: Any, first: Any, num_bytes: Any) -> Any:
    """Prefetch `num_bytes` from `array[first]` on into the L2 cache."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        array, first, num_bytes = args
        start = address(context, builder, signature.args[0], array, first, _I8)
        function_type = ir.FunctionType(ir.VoidType(), [_BYTES, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
        read, second_cache, data = (ir.Constant(_I32, value) for value in (0, 2, 1))
        with cgutils.for_range_slice(builder, ir.Constant(_I64, 0), num_bytes, ir.Constant(_I64, 64)) as (offset, _):
            builder.call(function, [builder.gep(start, [offset]), read, second_cache, data])
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64), generate


def _call(builder: ir.IRBuilder, name: str, args: list[Any]) -> None:
    function_type = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    builder.call(cgutils.get_or_insert_function(builder.module, function_type, f"llvm.x86.{name}"), args)


def address(context: Any, builder: ir.IRBuilder, array_type: Any, array: Any, index: Any, target: ir.Type) -> Any:
    """A pointer to `array[index]` of type `target`, for intrinsics."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), target.as_pointer())


def _with_address(name: str) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        _call(builder, name, [address(context, builder, signature.args[0], args[0], ir.Constant(_I64, 0), _I8)])
        return context.get_dummy_value()

    return generate


def _on_registers(name: str, *registers: Any) -> Any:
    """None unless all registers are literals, which makes numba retry with literals."""
    if not all(isinstance(register, types.IntegerLiteral) for register in registers):
        return None
    numbers = [ir.Constant(_I8, register.literal_value) for register in registers]

    def generate(context: Any, builder: ir.IRBuilder, _signature: Any, _args: Any) -> Any:
        _call(builder, name, numbers)
        return context.get_dummy_value()

    return types.void(*registers), generate


def _on_memory(name: str, register: Any, array: Any) -> Any:
    if not isinstance(register, types.IntegerLiteral):
        return None
    number = ir.Constant(_I8, register.literal_value)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        _, data, first, stride_bytes = args
        _call(builder, name, [number, address(context, builder, signature.args[1], data, first, _I8), stride_bytes])
        return context.get_dummy_value()

    return types.void(register, array, types.int64, types.int64), generate
