"""Linear layers whose result for one row need not depend on how many other rows are computed with it.

Three factories build a model's layers: PackedLinears for compiled kernels (packed_linear.py), and here TorchLinears and
Int8Linears.

oneDNN chooses its blocking by the number of rows: from 33 rows on it sums the products of a row in several parts (of
288 to 384 columns for the built-in model), up to 32 rows in one; the last bits differ. So where results must not depend
on the batch, products are never larger than INVARIANT_ROWS rows. Below that, `row_granularity` measures what is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812

from shard_server.engines.torch_engine.grouped_weight import AnyWeight, plain

INVARIANT_ROWS = 32
_TRIED_ROWS = (1, 2, 3, 4, 5, 7, 8, 12, 15, 16, 17, 20, 24, 28, 31, 32)
"""Sizes around every point where a library might switch its code. Trying all 32 would double the start time of an
engine."""
_TRIED_LARGE_ROWS = (33, 63, 100)
"""Tried where products are not split."""
_LARGE_ROWS = 128

Weight = tuple[AnyWeight, torch.Tensor | None]
"""[out_features, in_features], and the bias [out_features]."""


LookUp = Callable[[torch.Tensor], torch.Tensor]
"""int64 indices [n] → rows [n, size]."""


class Product(Protocol):
    """[rows, in_features] → [rows, out_features]"""

    @property
    def in_features(self) -> int: ...

    @property
    def is_whole(self) -> bool:
        """True when any number of rows is computed in one product and a row's bits still depend on that row only."""
        ...

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor: ...


class Linear(Product, Protocol):
    @property
    def weight_rows(self) -> LookUp | None:
        """Looks up the original weights of some outputs; None if they are not kept in that form."""
        ...

    def add(self, x: torch.Tensor, other: torch.Tensor, /) -> torch.Tensor:
        """xW + b + other"""
        ...

    def floats(self, x: torch.Tensor, /) -> torch.Tensor:
        """xW + b, float32"""
        ...


class MakesLinears(Protocol):
    """Builds the linear layers of one model."""

    def linear(self, weight: AnyWeight, bias: torch.Tensor | None, /) -> Linear: ...

    def gated(self, gate: Weight, up: Weight, /) -> Product:
        """silu(gate(x)) * up(x)"""
        ...


class TiledLinear:
    """bf16 weights in the CPU's own tile order, with the operation after the product fused into it.

    Packing once saves oneDNN from reordering the weights at every call (measured: decoding is 1.6 times as fast).
    All methods take [rows, in_features] and return [rows, out_features].
    """

    is_whole = False
    weight_rows = None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, max_rows: int | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._max_rows = max_rows
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), INVARIANT_ROWS)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return _by_rows(self._max_rows, self._unary, x)

    def floats(self, x: torch.Tensor) -> torch.Tensor:
        """xW + b, float32"""
        return self(x).float()

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        """silu(xW + b)"""
        return _by_rows(self._max_rows, self._silu, x)

    def multiply(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """(xW + b) * other"""
        return _by_rows(self._max_rows, self._multiply, x, other)

    def add(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """xW + b + other"""
        return _by_rows(self._max_rows, self._add, x, other)

    def _unary(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")

    def _silu(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "swish", [1.0], "")

    def _multiply(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise.binary(x, other, self._weight, self._bias, "mul")

    def _add(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise.binary(x, other, self._weight, self._bias, "add")


class PlainLinear:
    """The same with torch's ordinary operators: for float32, and for CPUs on which oneDNN has no bf16."""

    is_whole = False
    weight_rows = None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, max_rows: int | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._max_rows = max_rows
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return _by_rows(self._max_rows, self._linear, x)

    def floats(self, x: torch.Tensor) -> torch.Tensor:
        """xW + b, float32"""
        return self(x).float()

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        """silu(xW + b)"""
        return F.silu(self(x))

    def multiply(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """(xW + b) * other"""
        return self(x).mul_(other)

    def add(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """xW + b + other"""
        return self(x).add_(other)

    def _linear(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)


class TorchLinears:
    """Builds layers from torch's operators."""

    def __init__(self, max_rows: int | None) -> None:
        """`max_rows` limits the rows of one product. None: no limit, and results depend on the number of rows."""
        self._max_rows = max_rows

    def linear(self, weight: AnyWeight, bias: torch.Tensor | None) -> TiledLinear | PlainLinear:
        """The faster of the two that can compute with `weight`."""
        weight = plain(weight)
        is_on_cpu = weight.device.type == "cpu"
        if is_on_cpu and weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return TiledLinear(weight, bias, self._max_rows)
        return PlainLinear(weight, bias, self._max_rows)

    def gated(self, gate: Weight, up: Weight) -> Product:
        return _Gated(self.linear(*gate), self.linear(*up))


class _Gated:
    is_whole = False

    def __init__(self, gate: TiledLinear | PlainLinear, up: TiledLinear | PlainLinear) -> None:
        self.in_features = gate.in_features
        self.parts = gate, up

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.parts
        return up.multiply(x, gate.silu(x))

    def factors(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """gate(x) and up(x), float32"""
        gate, up = self.parts
        return gate.floats(x), up.floats(x)


def common_row_granularity(products: Sequence[Product], dtype: torch.dtype) -> int | None:
    """The multiple to which batches must be padded so that rows do not depend on the batch; None if no padding
    helps."""
    # Gated products hide their sums, so each part is measured as well.
    parts = [part for product in products if isinstance(product, _Gated) for part in product.parts]
    granularities = [row_granularity(product, dtype) for product in (*products, *parts)]
    if None in granularities:
        return None
    return max(granularity for granularity in granularities if granularity is not None)


def row_granularity(product: Product, dtype: torch.dtype) -> int | None:
    """The smallest g for which products of any multiple of g rows, up to INVARIANT_ROWS, give equal rows; also for
    more rows where products are not split.

    Measured on random input, bit for bit; None if there is no such g.
    """
    num_rows = _LARGE_ROWS if product.is_whole else INVARIANT_ROWS
    x = torch.randn(num_rows, product.in_features, generator=torch.Generator().manual_seed(0)).to(dtype)
    rounded = product(x)

    # Sums in another order mostly differ by less than rounding removes, and would be found equal. So the remainders of
    # the sums after rounding are compared, if the library can compute them in one operation.
    def rows_from(first_row: int) -> torch.Tensor:
        rows = x[first_row:]
        return product.add(rows, -rounded[first_row:]) if isinstance(product, TiledLinear) else product(rows)

    whole = rows_from(0)
    differs = {
        rows
        for rows in (*_TRIED_ROWS, *(_TRIED_LARGE_ROWS if product.is_whole else ()))
        # From the end, so that a row is also compared at another position in the product.
        if not torch.equal(rows_from(num_rows - rows), whole[-rows:])
    }
    for granularity in (1, 2, 4, 8, 16, 32):
        if not any(rows % granularity == 0 for rows in differs):
            return granularity
    return None


def _by_rows(max_rows: int | None, product: Callable[..., torch.Tensor], *rows: torch.Tensor) -> torch.Tensor:
    if max_rows is None or rows[0].shape[0] <= max_rows:
        return product(*rows)
    return torch.cat([product(*parts) for parts in zip(*(x.split(max_rows) for x in rows), strict=True)])
