"""Linear layers with int8 weights and a scale per output channel. Activations keep 15 bits, as two int8 digits.

The same holds on matrix tiles and in dot products (kernels/products); this module computes with torch's operators.

oneDNN multiplies 8-bit integers and sums in 32-bit ones: exactly, in any order. So a row's result does not depend on
how many other rows are computed with it, and products may be of any size. Its int8 by int8 kernel is fast only on CPUs
with tiles (elsewhere it takes 8 ms per row of 576 x 576), so digits are passed as uint8, with 128 added. torch's own
kernel for int8 weights with unquantised activations (`_weight_int8pack_mm`) is faster than bf16 for one row, but half
as fast from eight on. A single digit would save little in decoding, where reading the weights dominates, and would cost
most of the quality.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

from shard_server.engines.base import EngineError
from shard_server.engines.torch_engine.grouped_weight import AnyWeight, plain
from shard_server.engines.torch_engine.operators.linear import Product, Weight

_LIMIT = 127
"""Symmetric: -128 is not used, so that no product saturates on one kind of CPU only."""
_BASE = 2 * _LIMIT
"""One step of the first digit equals this many steps of the second."""
_OFFSET = 128
_SMALLEST = 1e-12
"""Replaces the largest value of a channel or row that is all zeros."""


class DigitRows(NamedTuple):
    """The digits of an input, which several products of it share."""

    digits: torch.Tensor
    """uint8 [2 * rows, in_features]: all first digits, then all second ones, each plus _OFFSET."""
    scales: torch.Tensor
    """float32 [rows, 1]; (first + second / _BASE) * scales is the input, rounded."""


class Int8Linear:
    """The methods of `PackedLinear`. Intermediate results (`silu`, `multiply`) stay float32: the next layer splits
    the computed values once."""

    is_whole = True
    weight_rows = None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, output_dtype: torch.dtype) -> None:
        """`weight`: [out_features, in_features]; raises EngineError if oneDNN cannot multiply int8."""
        self.out_features, self.in_features = weight.shape
        self._output_dtype = output_dtype
        values, scales = quantise_rows(weight)
        self._scales = scales.flatten()
        self._zero_points = torch.zeros(self.out_features, dtype=torch.int64)
        self._bias = None if bias is None else bias.float()
        try:
            self._weight = torch.ops.onednn.qlinear_prepack(values, None)
        except (AttributeError, RuntimeError) as error:
            raise EngineError(f"int8 weights are not supported here: {error}") from error

    def __call__(self, x: torch.Tensor | DigitRows) -> torch.Tensor:
        return self._product(x).to(self._output_dtype)

    def floats(self, x: torch.Tensor | DigitRows) -> torch.Tensor:
        """xW + b, float32"""
        return self._product(x)

    def silu(self, x: torch.Tensor | DigitRows) -> torch.Tensor:
        """silu(xW + b), float32"""
        return F.silu(self._product(x), inplace=True)

    def multiply(self, x: torch.Tensor | DigitRows, other: torch.Tensor) -> torch.Tensor:
        """(xW + b) * other, float32"""
        return self._product(x).mul_(other)

    def add(self, x: torch.Tensor | DigitRows, other: torch.Tensor) -> torch.Tensor:
        """xW + b + other, in the type of `other`"""
        return self._product(x).add_(other).to(other.dtype)

    def _product(self, x: torch.Tensor | DigitRows) -> torch.Tensor:
        digits, scales = x if isinstance(x, DigitRows) else split_digits(x)
        products = torch.ops.onednn.qlinear_pointwise(
            digits,
            1.0,
            _OFFSET,
            self._weight,
            self._scales,
            self._zero_points,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        # Not `split`: with no rows at all, as for the head within a prompt, that would return one part.
        first, second = products[: len(scales)], products[len(scales) :]
        # Not add_(alpha=...): that is fused within the library's vectors but not in their remainders.
        product = first.add_(second.div_(_BASE)).mul_(scales)
        return product if self._bias is None else product.add_(self._bias)


class Int8Linears:
    """Builds a model's linear layers. Raises EngineError if this CPU's products are not exact."""

    def __init__(self, output_dtype: torch.dtype) -> None:
        check_int8_products()
        self._output_dtype = output_dtype

    def linear(self, weight: AnyWeight, bias: torch.Tensor | None) -> Int8Linear:
        return Int8Linear(plain(weight), bias, self._output_dtype)

    def gated(self, gate: Weight, up: Weight) -> Product:
        return _Gated(self.linear(*gate), self.linear(*up))


class _Gated:
    is_whole = True

    def __init__(self, gate: Int8Linear, up: Int8Linear) -> None:
        self.in_features = gate.in_features
        self._gate, self._up = gate, up

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        digits = split_digits(x)
        return self._up.multiply(digits, self._gate.silu(digits))

    def factors(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """gate(x) and up(x), float32"""
        digits = split_digits(x)
        return self._gate.floats(digits), self._up.floats(digits)


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8 [rows, columns], float32 scales [rows, 1]): to the nearest of the 255 steps between minus and plus the
    largest magnitude of each row."""
    steps, scales = _steps(x)
    return steps.round_().to(torch.int8), scales


def split_digits(x: torch.Tensor) -> DigitRows:
    """Like `quantise_rows`, with a second digit for the rounding error of the first."""
    steps, scales = _steps(x)
    num_rows, num_columns = x.shape
    digits = torch.empty(2 * num_rows, num_columns, dtype=torch.int8)
    first = steps.round()
    digits[:num_rows] = first
    digits[num_rows:] = steps.sub_(first).mul_(_BASE).round_()
    return DigitRows(digits.view(torch.uint8).bitwise_xor_(_OFFSET), scales)  # in 8 bits, xor with 128 adds 128


def _steps(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(float32 x / scales, scales)"""
    # A copy, which is then modified in place.
    x = x.to(torch.float32, copy=True)
    scales = x.abs().amax(1, keepdim=True).clamp_min_(_SMALLEST).div_(_LIMIT)
    return x.div_(scales), scales


def check_int8_products() -> None:
    """Raise EngineError unless this machine's int8 products are exact: some CPUs add pairs in 16 bits, which
    can overflow."""
    num_columns = 256
    rows = torch.full((3, num_columns), _LIMIT, dtype=torch.float32)
    rows[1, ::2] = -_LIMIT
    rows[2] = torch.arange(num_columns) % (2 * _LIMIT + 1) - _LIMIT
    rows[2, 0] = _LIMIT
    linear = Int8Linear(rows.repeat(16, 1), None, torch.float32)
    if not torch.equal(linear(rows), (rows @ rows.T).repeat(1, 16)):
        raise EngineError(
            "int8 weights are not supported here: this CPU's int8 products are not exact; "
            "set shard.torch.kernels to auto, or shard.torch.weights to dtype"
        )
