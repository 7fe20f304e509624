"""Operations on sixteen float32 at a time, mostly from the sums of products to bf16. numba does not vectorise loops
whose indices it must compute.

LLVM splits the sixteen lanes into as many registers as the CPU needs. Each result is a function of its own lane only,
and sums over lanes have a fixed order, so that results are the same bits for every size of registers.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils

from shard_server.engines.torch_engine.kernels.codegen.llvm import (
    address,
    call,
    constant,
    intrinsic,
    multiply_add,
    spread,
)

_LANES = 16
_I16, _I32, _F32 = (ir.VectorType(scalar, _LANES) for scalar in (ir.IntType(16), ir.IntType(32), ir.FloatType()))
_EXP2 = (9.9999994e-1, 6.9315308e-1, 2.4015361e-1, 5.5826318e-2, 8.9893397e-3, 1.8775767e-3)
"""A polynomial for 2**x on [0, 1] with a relative error of 1e-6, lowest power first."""
_ERF_STEP = 0.3275911
_ERF = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
"""See `_gelu`."""

_Lanes = Any


@intrinsic
def copied(_typing: Any, source: Any, first: Any, target: Any, target_first: Any) -> Any:
    """target[target_first ..] = the float32 of source[first ..]. `target` may have another type; `target_first` counts
    its elements."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        source, first, target, target_first = args
        sums = _load(context, builder, signature.args[0], source, first, _F32)
        _store(context, builder, signature.args[2], target, target_first, sums)
        return context.get_dummy_value()

    return types.void(source, types.int64, target, types.int64), generate


@intrinsic
def joined_digits(
    _typing: Any, sums: Any, first: Any, second: Any, base: Any, row_scale: Any, scales: Any, bias: Any, column: Any
) -> Any:
    """Convert the int32 sums[first ..] to float32: add the sums of second digits, sums[second ..] / base; multiply by
    row_scale and scales[column ..]; add bias[column ..]."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        sums, first, second, base, row_scale, scales, bias, column = args
        digits = [
            builder.sitofp(_load(context, builder, signature.args[0], sums, place, _I32), _F32)
            for place in (first, second)
        ]
        inverse = builder.fdiv(_floats(1.0), _spread(builder, base))
        product = multiply_add(builder, digits[1], inverse, digits[0])
        product = builder.fmul(product, _spread(builder, row_scale))
        column_scales = _load(context, builder, signature.args[5], scales, column, _F32)
        column_bias = _load(context, builder, signature.args[6], bias, column, _F32)
        product = multiply_add(builder, product, column_scales, column_bias)
        _store(context, builder, signature.args[0], sums, first, product)
        return context.get_dummy_value()

    args = (sums, types.int64, types.int64, types.float32, types.float32, scales, bias, types.int64)
    return types.void(*args), generate


@intrinsic
def largest_between(_typing: Any, source: Any, first: Any, width: Any, seen_from: Any, seen_to: Any) -> Any:
    """The largest of float32 source[first + seen_from] to source[first + seen_to - 1]; `width`, a multiple of 16,
    covers them."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        source, first, width, seen_from, seen_to = args
        most = cgutils.alloca_once_value(builder, _floats(-math.inf))
        with _each(builder, width) as index:
            scores = _load(context, builder, signature.args[0], source, builder.add(first, index), _F32)
            is_seen = _is_between(builder, index, seen_from, seen_to)
            seen = builder.select(is_seen, scores, _floats(-math.inf))
            builder.store(_larger(builder, seen, builder.load(most)), most)
        function_type = ir.FunctionType(_F32.element, [_F32])
        reduce = cgutils.get_or_insert_function(builder.module, function_type, "llvm.vector.reduce.fmax.v16f32")
        return builder.call(reduce, [builder.load(most)], fastmath=("nnan", "nsz"))

    return types.float32(source, types.int64, types.int64, types.int64, types.int64), generate


@intrinsic
def scaled(_typing: Any, target: Any, first: Any, width: Any, factor: Any) -> Any:
    """target[first ..] *= factor; `width` is a multiple of 16."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        target, first, width, factor = args
        factor = _spread(builder, factor)
        with _each(builder, width) as index:
            place = builder.add(first, index)
            numbers = _load(context, builder, signature.args[0], target, place, _F32)
            _store(context, builder, signature.args[0], target, place, builder.fmul(numbers, factor))
        return context.get_dummy_value()

    return types.void(target, types.int64, types.int64, types.float32), generate


@intrinsic
def sum_of_squares(_typing: Any, source: Any, first: Any, width: Any) -> Any:
    """The sum of the squares of bf16 source[first ..]; `width` is a multiple of 32."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        source, first, width = args
        sums = [cgutils.alloca_once_value(builder, _floats(0.0)) for _ in range(2)]
        with _each(builder, width, 2 * _LANES) as index:
            for part, own in enumerate(sums):
                place = builder.add(builder.add(first, index), ir.Constant(index.type, part * _LANES))
                numbers = _widened(builder, _load(context, builder, signature.args[0], source, place, _I16))
                builder.store(multiply_add(builder, numbers, numbers, builder.load(own)), own)
        return _sum(builder, builder.fadd(builder.load(sums[0]), builder.load(sums[1])))

    return types.float32(source, types.int64, types.int64), generate


@intrinsic
def dot(_typing: Any, a: Any, first_a: Any, b: Any, first_b: Any, width: Any) -> Any:
    """The sum of the products of bf16 a[first_a ..] and b[first_b ..]; `width` is a multiple of 32."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        a, first_a, b, first_b, width = args
        sums = [cgutils.alloca_once_value(builder, _floats(0.0)) for _ in range(2)]
        for own in sums:
            builder.store(_floats(0.0), own)  # the function may be inlined into a loop
        with _each(builder, width, 2 * _LANES) as index:
            for part, own in enumerate(sums):
                offset = builder.add(index, ir.Constant(index.type, part * _LANES))
                left, right = (
                    _widened(builder, _load(context, builder, kind, array, builder.add(first, offset), _I16))
                    for kind, array, first in ((signature.args[0], a, first_a), (signature.args[2], b, first_b))
                )
                builder.store(multiply_add(builder, left, right, builder.load(own)), own)
        return _sum(builder, builder.fadd(builder.load(sums[0]), builder.load(sums[1])))

    return types.float32(a, types.int64, b, types.int64, types.int64), generate


@intrinsic
def add_scaled(_typing: Any, target: Any, target_first: Any, source: Any, first: Any, width: Any, factor: Any) -> Any:
    """target[target_first ..] (float32) += factor * source[first ..] (bf16); `width` is a multiple of 16."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        target, target_first, source, first, width, factor = args
        factor = _spread(builder, factor)
        with _each(builder, width) as index:
            place = builder.add(target_first, index)
            sums = _load(context, builder, signature.args[0], target, place, _F32)
            source_place = builder.add(first, index)
            numbers = _widened(builder, _load(context, builder, signature.args[2], source, source_place, _I16))
            sums = multiply_add(builder, numbers, factor, sums)
            _store(context, builder, signature.args[0], target, place, sums)
        return context.get_dummy_value()

    return types.void(target, types.int64, source, types.int64, types.int64, types.float32), generate


class RoundingOps(NamedTuple):
    """The operations that round to bf16 or compute powers, for which some CPUs have instructions."""

    rounded: Any
    rounded_sum: Any
    rounded_gated: Any
    rounded_gelu: Any
    layer_norm: Any
    weigh: Any
    exp2: Any


@functools.cache
def rounding_ops(*, native: bool) -> RoundingOps:
    """`native`: with the instructions of AVX-512 BF16, which all CPUs with AMX have; they flush denormal numbers to
    zero. Otherwise any CPU computes the same bits."""
    _bf16, _exp2 = (_native_bf16, _native_exp2) if native else (_portable_bf16, _portable_exp2)

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
            others = _widened(builder, _load(context, builder, signature.args[2], other, target_first, _I16))
            _store(
                context, builder, signature.args[3], target, target_first, _bf16(builder, builder.fadd(sums, others))
            )
            return context.get_dummy_value()

        return types.void(source, types.int64, other, target, types.int64), generate

    @intrinsic
    def rounded_gated(_typing: Any, source: Any, first: Any, gated_first: Any, target: Any, target_first: Any) -> Any:
        """target[target_first ..] = bf16 of silu(source[first ..]) * source[gated_first ..]"""

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            source, first, gated_first, target, target_first = args
            gates = _load(context, builder, signature.args[0], source, first, _F32)
            gated = _load(context, builder, signature.args[0], source, gated_first, _F32)
            product = builder.fmul(builder.fmul(gates, _sigmoid(builder, gates, _exp2)), gated)
            _store(context, builder, signature.args[3], target, target_first, _bf16(builder, product))
            return context.get_dummy_value()

        return types.void(source, types.int64, types.int64, target, types.int64), generate

    @intrinsic
    def rounded_gelu(_typing: Any, source: Any, first: Any, target: Any, target_first: Any) -> Any:
        """target[target_first ..] = bf16 of gelu(source[first ..])"""

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            source, first, target, target_first = args
            numbers = _gelu(builder, _load(context, builder, signature.args[0], source, first, _F32), _exp2)
            _store(context, builder, signature.args[2], target, target_first, _bf16(builder, numbers))
            return context.get_dummy_value()

        return types.void(source, types.int64, target, types.int64), generate

    @intrinsic
    def layer_norm(_typing: Any, numbers: Any, weight: Any, bias: Any, epsilon: Any, out: Any) -> Any:
        """numbers = (numbers - their mean) / their standard deviation * weight + bias, float32; out = their bf16. The
        size is a multiple of 32."""

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            numbers, weight, bias, epsilon, out = args
            own, width = signature.args[0], cgutils.create_struct_proxy(signature.args[0])(context, builder, numbers)
            width = width.nitems

            def at(index: Any) -> _Lanes:
                return _load(context, builder, own, numbers, index, _F32)

            size = builder.sitofp(width, _F32.element)
            mean = _spread(builder, builder.fdiv(_summed(builder, width, at), size))

            def square(index: Any) -> _Lanes:
                rest = builder.fsub(at(index), mean)
                return builder.fmul(rest, rest)

            variance = builder.fadd(builder.fdiv(_summed(builder, width, square), size), epsilon)
            root = call(builder, "llvm.sqrt.v16f32", _spread(builder, variance))
            factor = builder.fdiv(_floats(1.0), root)
            with _each(builder, width) as index:
                scale = builder.fmul(factor, _load(context, builder, signature.args[1], weight, index, _F32))
                shift = _load(context, builder, signature.args[2], bias, index, _F32)
                found = multiply_add(builder, builder.fsub(at(index), mean), scale, shift)
                _store(context, builder, own, numbers, index, found)
                _store(context, builder, signature.args[4], out, index, _bf16(builder, found))
            return context.get_dummy_value()

        return types.void(numbers, weight, bias, types.float32, out), generate

    @intrinsic
    def weigh(
        _typing: Any,
        source: Any,
        first: Any,
        width: Any,
        seen_from: Any,
        seen_to: Any,
        scale: Any,
        shift: Any,
        target: Any,
        target_first: Any,
    ) -> Any:
        """target[target_first ..] = 2**(source[first ..] * scale - shift) in the range of `largest_between`, else
        0, in the type of `target`, which is float32 or bf16. Returns their sum, float32."""

        is_float = target.dtype == types.float32

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            source, first, width, seen_from, seen_to, scale, shift, target, target_first = args
            scale, shift = _spread(builder, scale), _spread(builder, builder.fneg(shift))
            sums = cgutils.alloca_once_value(builder, _floats(0.0))
            with _each(builder, width) as index:
                scores = _load(context, builder, signature.args[0], source, builder.add(first, index), _F32)
                powers = multiply_add(builder, scores, scale, shift)
                is_seen = _is_between(builder, index, seen_from, seen_to)
                weights = builder.select(is_seen, _exp2(builder, powers), _floats(0.0))
                if not is_float:
                    weights = _bf16(builder, weights)
                _store(context, builder, signature.args[7], target, builder.add(target_first, index), weights)
                added = weights if is_float else _widened(builder, weights)
                builder.store(builder.fadd(builder.load(sums), added), sums)
            return _sum(builder, builder.load(sums))

        args = (source, *[types.int64] * 4, types.float32, types.float32, target, types.int64)
        return types.float32(*args), generate

    @intrinsic
    def exp2(_typing: Any, x: Any) -> Any:
        """2**x of one finite float32, as in `weigh`."""

        def generate(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
            return builder.extract_element(_exp2(builder, _spread(builder, args[0])), ir.Constant(ir.IntType(32), 0))

        return types.float32(types.float32), generate

    return RoundingOps(rounded, rounded_sum, rounded_gated, rounded_gelu, layer_norm, weigh, exp2)


@contextlib.contextmanager
def _each(builder: ir.IRBuilder, width: Any, step: int = _LANES) -> Iterator[Any]:
    """A loop over `width` in steps of `step`."""
    first, stride = (ir.Constant(width.type, value) for value in (0, step))
    with cgutils.for_range_slice(builder, first, width, stride) as (index, _):
        yield index


def _is_between(builder: ir.IRBuilder, index: Any, first: Any, end: Any) -> _Lanes:
    """True for each lane whose index + lane is in [first, end)."""
    lanes = ir.Constant(_I32, list(range(_LANES)))
    places = builder.add(_spread(builder, builder.trunc(index, _I32.element)), lanes)
    first, end = (_spread(builder, builder.trunc(bound, _I32.element)) for bound in (first, end))
    return builder.and_(builder.icmp_signed(">=", places, first), builder.icmp_signed("<", places, end))


def _load(context: Any, builder: ir.IRBuilder, array_type: Any, array: Any, first: Any, lanes: ir.Type) -> _Lanes:
    return builder.load(address(context, builder, array_type, array, first, lanes), align=2)


def _store(context: Any, builder: ir.IRBuilder, array_type: Any, array: Any, first: Any, lanes: _Lanes) -> None:
    builder.store(lanes, address(context, builder, array_type, array, first, lanes.type), align=2)


class _Bfloat(ir.Type):
    """LLVM's type bfloat, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"


def _native_bf16(builder: ir.IRBuilder, x: _Lanes) -> _Lanes:
    """The bits of the nearest bf16 number, ties to even."""
    return builder.bitcast(builder.fptrunc(x, ir.VectorType(_Bfloat(), _LANES)), _I16)


def _portable_bf16(builder: ir.IRBuilder, x: _Lanes) -> _Lanes:
    """The same. NaN is not handled."""
    bits = builder.bitcast(x, _I32)
    odd = builder.and_(builder.lshr(bits, _integers(16)), _integers(1))
    rounded_up = builder.add(builder.add(bits, _integers(0x7FFF)), odd)
    return builder.trunc(builder.lshr(rounded_up, _integers(16)), _I16)


def _widened(builder: ir.IRBuilder, bits: _Lanes) -> _Lanes:
    """float32 of bf16"""
    return builder.bitcast(builder.shl(builder.zext(bits, _I32), _integers(16)), _F32)


def _sigmoid(builder: ir.IRBuilder, x: _Lanes, _exp2: Callable[[ir.IRBuilder, _Lanes], _Lanes]) -> _Lanes:
    """The sigmoid of finite x."""
    power = _exp2(builder, builder.fmul(x, _floats(-math.log2(math.e))))
    return builder.fdiv(_floats(1.0), builder.fadd(power, _floats(1.0)))


def _gelu(builder: ir.IRBuilder, x: _Lanes, _exp2: Callable[[ir.IRBuilder, _Lanes], _Lanes]) -> _Lanes:
    """x times the normal distribution's probability of less than finite x, by the approximation of erf of Abramowitz
    and Stegun, 7.1.26: an error of 1e-7."""
    size = call(builder, "llvm.fabs.v16f32", builder.fmul(x, _floats(math.sqrt(0.5))))
    t = builder.fdiv(_floats(1.0), multiply_add(builder, size, _floats(_ERF_STEP), _floats(1.0)))
    series = _floats(_ERF[-1])
    for factor in reversed(_ERF[:-1]):
        series = multiply_add(builder, series, t, _floats(factor))
    power = _exp2(builder, builder.fmul(builder.fmul(size, size), _floats(-math.log2(math.e))))
    tail = builder.fmul(builder.fmul(builder.fmul(series, t), power), _floats(0.5))
    share = builder.select(builder.fcmp_ordered("<", x, _floats(0.0)), tail, builder.fsub(_floats(1.0), tail))
    return builder.fmul(x, share)


def _summed(builder: ir.IRBuilder, width: Any, at: Callable[[Any], _Lanes]) -> Any:
    """The sum of `at(index)` over `width`, a multiple of 32."""
    sums = [cgutils.alloca_once_value(builder, _floats(0.0)) for _ in range(2)]
    for own in sums:
        builder.store(_floats(0.0), own)  # the function may be inlined into a loop
    with _each(builder, width, 2 * _LANES) as index:
        for part, own in enumerate(sums):
            place = builder.add(index, ir.Constant(index.type, part * _LANES))
            builder.store(builder.fadd(builder.load(own), at(place)), own)
    return _sum(builder, builder.fadd(builder.load(sums[0]), builder.load(sums[1])))


def _native_exp2(builder: ir.IRBuilder, x: _Lanes) -> _Lanes:
    """2**x of finite x with a relative error of 1e-6; 0 and infinity if the result is too small or too large."""
    whole, power = _exp2_parts(builder, x)
    all_lanes, rounding_as_set = ir.Constant(ir.IntType(16), -1), ir.Constant(ir.IntType(32), 4)
    name = "llvm.x86.avx512.mask.scalef.ps.512"
    return call(builder, name, power, whole, _floats(0.0), all_lanes, rounding_as_set)


def _portable_exp2(builder: ir.IRBuilder, x: _Lanes) -> _Lanes:
    """The same, but results below the smallest normal number are 0."""
    whole, power = _exp2_parts(builder, x)
    # As exponents, the limits are those of 0 and of infinity.
    whole = builder.select(builder.fcmp_ordered("<", whole, _floats(-127.0)), _floats(-127.0), whole)
    whole = builder.select(builder.fcmp_ordered(">", whole, _floats(128.0)), _floats(128.0), whole)
    exponent = builder.add(builder.fptosi(whole, _I32), _integers(127))
    return builder.fmul(power, builder.bitcast(builder.shl(exponent, _integers(23)), _F32))


def _exp2_parts(builder: ir.IRBuilder, x: _Lanes) -> tuple[_Lanes, _Lanes]:
    """The whole part of x, and 2**(the rest of x)."""
    whole = call(builder, "llvm.floor.v16f32", x)
    fraction = builder.fsub(x, whole)
    power = _floats(_EXP2[-1])
    for factor in reversed(_EXP2[:-1]):
        power = multiply_add(builder, power, fraction, _floats(factor))
    return whole, power


def _sum(builder: ir.IRBuilder, x: _Lanes) -> Any:
    """The sum of all lanes: the upper half is added to the lower one until one is left."""
    for size in (8, 4, 2, 1):
        halves = []
        for first in (0, size):
            lanes = ir.Constant(ir.VectorType(_I32.element, size), list(range(first, first + size)))
            halves.append(builder.shuffle_vector(x, ir.Constant(x.type, ir.Undefined), lanes))
        x = builder.fadd(*halves)
    return builder.extract_element(x, ir.Constant(_I32.element, 0))


def _larger(builder: ir.IRBuilder, a: _Lanes, b: _Lanes) -> _Lanes:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _spread(builder: ir.IRBuilder, scalar: Any) -> _Lanes:
    return spread(builder, scalar, _LANES)


def _integers(value: int) -> ir.Constant:
    return constant(_I32, value)


def _floats(value: float) -> ir.Constant:
    return constant(_F32, value)
