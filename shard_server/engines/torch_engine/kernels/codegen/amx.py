"""Intel's matrix tiles (AMX) for compiled kernels: eight registers of 16 rows of 64 bytes, and their products.

`tile_dot(c, a, b)` adds to the float32 [16, 16] in c the product of bf16 [16, 32] in a and [32, 16] in b; b's rows 2i
and 2i+1 lie in one row of the register as pairs. Every sum runs in the order of the 32, in float32, whatever the other
rows and columns hold: so rows have the same bits in any batch.

The register numbers are part of the instructions, so they must be literals. oneDNN uses the same registers with a
configuration of its own, which a kernel restores when it ends.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from shard_server.engines.torch_engine.kernels.codegen.llvm import address, intrinsic

_I8, _I64 = ir.IntType(8), ir.IntType(64)


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


def _call(builder: ir.IRBuilder, name: str, args: list[Any]) -> None:
    function_type = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    builder.call(cgutils.get_or_insert_function(builder.module, function_type, f"llvm.x86.{name}"), args)


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
