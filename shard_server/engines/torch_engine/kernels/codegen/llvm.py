"""Pieces of LLVM code that several intrinsics are made of."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic as _intrinsic

from shard_server.engines.torch_engine.kernels.codegen.cpu import has_fma

intrinsic: Any = _intrinsic
"""numba's decorator; its result has one parameter less than the function, which type checkers cannot infer."""
_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)


def address(context: Any, builder: ir.IRBuilder, array_type: Any, array: Any, index: Any, target: ir.Type) -> Any:
    """A pointer to `array[index]` of type `target`."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), target.as_pointer())


def call(builder: ir.IRBuilder, name: str, *args: Any) -> Any:
    """Call LLVM's intrinsic `name`, whose result has the type of the first argument."""
    function_type = ir.FunctionType(args[0].type, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), args)


def multiply_add(builder: ir.IRBuilder, a: Any, b: Any, c: Any) -> Any:
    """a * b + c of vectors of float32, with one rounding where the CPU can. Elsewhere LLVM would call a function for
    every lane."""
    if has_fma():
        return call(builder, f"llvm.fma.v{a.type.count}f32", a, b, c)
    return builder.fadd(builder.fmul(a, b), c)


def spread(builder: ir.IRBuilder, scalar: Any, lanes: int) -> Any:
    """A vector of `lanes` times the same."""
    vector = ir.VectorType(scalar.type, lanes)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, one, constant(ir.VectorType(_I32, lanes), 0))


def load_vector(builder: ir.IRBuilder, start: Any, index: Any, vector: ir.VectorType) -> Any:
    """A vector from element `index` (int64) of what `start` points to."""
    return builder.load(builder.bitcast(builder.gep(start, [index]), vector.as_pointer()), align=4)


def store_vector(builder: ir.IRBuilder, start: Any, index: Any, vector: Any) -> None:
    builder.store(vector, builder.bitcast(builder.gep(start, [index]), vector.type.as_pointer()), align=4)


def prefetch_line(builder: ir.IRBuilder, pointer: Any) -> None:
    """Prefetch what `pointer` (to bytes) points to into the L2 cache."""
    function_type = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
    builder.call(function, [pointer, *(ir.Constant(_I32, value) for value in (0, 2, 1))])  # read, second cache, data


def integer(value: int) -> ir.Constant:
    return ir.Constant(_I64, value)


def constant(vector: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(vector, [value] * vector.count)
