"""Linear layers with int8 weights, a scale per output channel. Activations keep 15 bits, as two int8 digits.

So it is where tiles compute (tile_matmul_int8.py) and, elsewhere, here:

oneDNN multiplies 8-bit integers and sums in 32-bit ones: exactly, in whatever order. So a row's result does not
depend on how many other rows are computed with it, and products may be of any size. Of int8 by int8 it has a quick
kernel only where there are tiles (elsewhere 8 ms a row of 576 x 576): digits go in as uint8, 128 more than they are.
torch's own kernel for int8 weights with unquantised activations (`_weight_int8pack_mm`) is faster than bf16 for one
row, but half as fast from eight on. One digit would save little when decoding, where weights are what is read, and
costs most of the quality.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

from shard_server.engines.base import EngineError
from shard_server.engines.torch_engine.linear import Product, Weight

_LIMIT = 127
"""Symmetric: -128 is not used, so that a product never saturates where others would not."""
_BASE = 2 * _LIMIT
"""A step of the first digit is so many of the second's."""
_OFFSET = 128
_SMALLEST = 1e-12
"""Stands for the largest value of a channel or row that is all zeros."""


class DigitRows(NamedTuple):
    """What several products of one input share."""

    digits: torch.Tensor
    """uint8 [2 * rows, in_features]: all first digits, then all second ones, each plus _OFFSET."""
    scales: torch.Tensor
    """float32 [rows, 1]; (first + second / _BASE) * scales is the input, rounded."""


class Int8Linear:
    """The methods of `PackedLinear`. Intermediate results (`silu`, `multiply`) stay float32: what follows splits
    them once, from what was computed."""

    is_whole = True
    weight_rows = None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, output_dtype: torch.dtype) -> None:
        """`weight`: [out_features, in_features]; raises EngineError where oneDNN cannot multiply int8."""
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
        # Not split: of no rows at all, which the head gets in the middle of a prompt, that makes one part.
        first, second = products[: len(scales)], products[len(scales) :]
        # Not add_(alpha=...): that is fused where the library's vectors reach and is not at their ends.
        product = first.add_(second.div_(_BASE)).mul_(scales)
        return product if self._bias is None else product.add_(self._bias)


class Int8Linears:
    """Makes a model's linear layers. Raises EngineError where this CPU's products are not exact."""

    def __init__(self, output_dtype: torch.dtype) -> None:
        check_int8_products()
        self._output_dtype = output_dtype

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Int8Linear:
        return Int8Linear(weight, bias, self._output_dtype)

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


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8 [rows, columns], float32 scales [rows, 1]): to the nearest of the 255 steps between minus and plus the
    largest magnitude of each row."""
    steps, scales = _steps(x)
    return steps.round_().to(torch.int8), scales


def split_digits(x: torch.Tensor) -> DigitRows:
    """As `quantise_rows`, and a second digit for what that rounds away."""
    steps, scales = _steps(x)
    num_rows, num_columns = x.shape
    digits = torch.empty(2 * num_rows, num_columns, dtype=torch.int8)
    first = steps.round()
    digits[:num_rows] = first
    digits[num_rows:] = steps.sub_(first).mul_(_BASE).round_()
    return DigitRows(digits.view(torch.uint8).bitwise_xor_(_OFFSET), scales)  # xor: what + 128 is in 8 bits


def _steps(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(float32 x / scales, scales)"""
    # A copy, which is then worked on in place.
    x = x.to(torch.float32, copy=True)
    scales = x.abs().amax(1, keepdim=True).clamp_min_(_SMALLEST).div_(_LIMIT)
    return x.div_(scales), scales


def check_int8_products() -> None:
    """Raise EngineError unless this machine's int8 products are exact: some CPUs add up pairs in 16 bits, which
    overflow."""
    num_columns = 256
    rows = torch.full((3, num_columns), _LIMIT, dtype=torch.float32)
    rows[1, ::2] = -_LIMIT
    rows[2] = torch.arange(num_columns) % (2 * _LIMIT + 1) - _LIMIT
    rows[2, 0] = _LIMIT
    linear = Int8Linear(rows.repeat(16, 1), None, torch.float32)
    if not torch.equal(linear(rows), (rows @ rows.T).repeat(1, 16)):
        raise EngineError("int8 weights are not supported here: this CPU's int8 products are not exact")
