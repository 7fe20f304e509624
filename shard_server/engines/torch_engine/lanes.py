# ruff: noqa: ARG001  (intrinsics get their arguments through LLVM)
"""Sixteen float32 at a time, from sums that tiles have left in the cache to bf16: numba makes no such vectors of loops
whose places it must compute.

Each is a function of its lane alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from shard_server.engines.torch_engine.amx import address, intrinsic

_LANES = 16
_I16, _I32, _F32 = (ir.VectorType(scalar, _LANES) for scalar in (ir.IntType(16), ir.IntType(32), ir.FloatType()))
_EXP2 = (9.9999994e-1, 6.9315308e-1, 2.4015361e-1, 5.5826318e-2, 8.9893397e-3, 1.8775767e-3)
"""2**x on [0, 1], to 1e-6 of it; as in compiled.exp2."""

_Lanes = Any
_Maker = Callable[[ir.IRBuilder, list[_Lanes]], _Lanes]


@intrinsic
def copied(_typing: Any, source: Any, first: Any, target: Any, target_first: Any) -> Any:
    """target[target_first ..] = the float32 of source[first ..]; `target` may be of another type, counted in its
    own numbers."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        source, first, target, target_first = args
        sums = _load(context, builder, signature.args[0], source, first, _F32)
        _store(context, builder, signature.args[2], target, target_first, sums)
        return context.get_dummy_value()

    return types.void(source, types.int64, target, types.int64), generate


@intrinsic
def rounded(_typing: Any, source: Any, first: Any, target: Any, target_first: Any) -> Any:
    """target[target_first ..] = bf16 of source[first ..]"""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        source, first, target, target_first = args
        sums = _load(context, builder, signature.args[0], source, first, _F32)
        _store(context, builder, signature.args[2], target, target_first, _bf16(builder, sums))
        return context.get_dummy_value()

    return types.void(source, types.int64, target, types.int64), generate


@intrinsic
def rounded_sum(_typing: Any, source: Any, first: Any, other: Any, target: Any, target_first: Any) -> Any:
    """target[target_first ..] = bf16 of source[first ..] + the bf16 of other[target_first ..]"""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        source, first, other, target, target_first = args
        sums = _load(context, builder, signature.args[0], source, first, _F32)
        others = builder.zext(_load(context, builder, signature.args[2], other, target_first, _I16), _I32)
        others = builder.bitcast(builder.shl(others, _integers(16)), _F32)
        _store(context, builder, signature.args[3], target, target_first, _bf16(builder, builder.fadd(sums, others)))
        return context.get_dummy_value()

    return types.void(source, types.int64, other, target, types.int64), generate


@intrinsic
def rounded_gated(_typing: Any, source: Any, first: Any, gated_first: Any, target: Any, target_first: Any) -> Any:
    """target[target_first ..] = bf16 of silu(source[first ..]) * source[gated_first ..]"""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        source, first, gated_first, target, target_first = args
        gates = _load(context, builder, signature.args[0], source, first, _F32)
        gated = _load(context, builder, signature.args[0], source, gated_first, _F32)
        product = builder.fmul(builder.fmul(gates, _sigmoid(builder, gates)), gated)
        _store(context, builder, signature.args[3], target, target_first, _bf16(builder, product))
        return context.get_dummy_value()

    return types.void(source, types.int64, types.int64, target, types.int64), generate


def _load(context: Any, builder: ir.IRBuilder, array_type: Any, array: Any, first: Any, lanes: ir.Type) -> _Lanes:
    return builder.load(address(context, builder, array_type, array, first, lanes), align=2)


def _store(context: Any, builder: ir.IRBuilder, array_type: Any, array: Any, first: Any, lanes: _Lanes) -> None:
    builder.store(lanes, address(context, builder, array_type, array, first, lanes.type), align=2)


def _bf16(builder: ir.IRBuilder, x: _Lanes) -> _Lanes:
    """The bits of the nearest, ties to even; NaN is not minded."""
    bits = builder.bitcast(x, _I32)
    odd = builder.and_(builder.lshr(bits, _integers(16)), _integers(1))
    return builder.trunc(builder.lshr(builder.add(builder.add(bits, _integers(0x7FFF)), odd), _integers(16)), _I16)


def _sigmoid(builder: ir.IRBuilder, x: _Lanes) -> _Lanes:
    """1 / (1 + 2**y) with y = -x * log2(e), which is kept where neither overflows."""
    y = builder.fmul(x, _floats(-math.log2(math.e)))
    for bound, sign in ((-126.0, "<"), (126.0, ">")):
        y = builder.select(builder.fcmp_ordered(sign, y, _floats(bound)), _floats(bound), y)
    whole = _call(builder, "llvm.floor.v16f32", y)
    fraction = builder.fsub(y, whole)
    power = _floats(_EXP2[-1])
    for factor in reversed(_EXP2[:-1]):
        power = builder.fadd(builder.fmul(power, fraction), _floats(factor))
    exponent = builder.shl(builder.add(builder.fptosi(whole, _I32), _integers(127)), _integers(23))
    power = builder.fmul(power, builder.bitcast(exponent, _F32))
    return builder.fdiv(_floats(1.0), builder.fadd(power, _floats(1.0)))


def _call(builder: ir.IRBuilder, name: str, x: _Lanes) -> _Lanes:
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(x.type, [x.type]), name)
    return builder.call(function, [x])


def _integers(value: int) -> ir.Constant:
    return ir.Constant(_I32, [value] * _LANES)


def _floats(value: float) -> ir.Constant:
    return ir.Constant(_F32, [value] * _LANES)
