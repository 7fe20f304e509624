"""Measures one kernel family's matrix product, in a process of its own.

An instruction that the CPU reports but that does not work ends that process and not the shard's, and one that is
emulated takes no longer than a shard waits for the process.

    python -m shard_server.engines.torch_engine.kernels.probe FAMILY

prints {"seconds_of_one_row": .., "seconds_of_many_rows": .., "error": ..}: the time for each row of a product of one
and of many rows, and its largest error compared with float64, as a share of what float32 may lose.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from shard_server.engines.torch_engine.kernels.codegen.compiled import aligned_zeros, jit
from shard_server.engines.torch_engine.kernels.codegen.vector_blocks import Bf16Dots, Bf16Pairs
from shard_server.engines.torch_engine.kernels.families import FAMILIES, Family, Products, why_missing
from shard_server.engines.torch_engine.kernels.products.dots import pair_row
from shard_server.engines.torch_engine.kernels.products.outputs import FLOATS, PANEL
from shard_server.engines.torch_engine.kernels.products.vectors import make_multiply, widen_row

_MANY_ROWS: Final = 32
_DEPTH: Final = 512
_COLUMNS: Final = 512
_RUNS: Final = 15
_LOSS: Final = 1e-5
"""The share of the sum of the products' magnitudes that a sum in float32 may lose."""

_Array = np.ndarray[Any, Any]


def measure(family: Family) -> dict[str, float]:
    """Compile the family's bf16 product, check it, and time it for one row and for _MANY_ROWS."""
    generator = np.random.default_rng(0)
    weights = _bf16(generator.standard_normal((_COLUMNS, _DEPTH)))
    rows = _bf16(generator.standard_normal((_MANY_ROWS, _DEPTH)))
    multiply = _product(family, _packed(weights))
    found: dict[str, float] = {"error": 0.0}
    for name, num_rows in (("seconds_of_one_row", 1), ("seconds_of_many_rows", _MANY_ROWS)):
        x, out = rows[:num_rows].copy(), aligned_zeros(num_rows * _COLUMNS, np.float32)
        multiply(x, out)
        exact = _floats(x).astype(np.float64) @ _floats(weights).astype(np.float64).T
        magnitude = np.abs(_floats(x)) @ np.abs(_floats(weights)).T
        error = np.abs(out.reshape(num_rows, _COLUMNS) - exact) / (_LOSS * magnitude)
        found["error"] = max(found["error"], float(error.max()))
        found[name] = min(_seconds(multiply, x, out) for _ in range(_RUNS)) / num_rows
    return found


def _seconds(multiply: Callable[[_Array, _Array], None], x: _Array, out: _Array) -> float:
    begin = time.perf_counter()
    multiply(x, out)
    return time.perf_counter() - begin


def _product(family: Family, weights: _Array) -> Callable[[_Array, _Array], None]:
    """(bf16 rows, float32 out), both bf16 as uint16"""
    # Arguments, since compiled code treats arrays that it closes over as constants.
    bias, num_panels = aligned_zeros(_COLUMNS, np.float32), _COLUMNS // PANEL
    if family.products is Products.TILES:
        from shard_server.engines.torch_engine.kernels.codegen.amx import (
            load_tile_configuration,
            store_tile_configuration,
        )
        from shard_server.engines.torch_engine.kernels.products.amx_bf16 import multiply as multiply_tiles
        from shard_server.engines.torch_engine.kernels.products.amx_tasks import new_amx_scratches, scratch_at

        @jit()
        def run_tiles(x: Any, weights: Any, bias: Any, out: Any, found: Any, address: Any) -> None:
            store_tile_configuration(found)
            multiply_tiles(x, _DEPTH, weights, bias, 0, num_panels, FLOATS, out, out, scratch_at(address))
            load_tile_configuration(found)

        scratches, found = new_amx_scratches(1), aligned_zeros(64, np.uint8)
        address = scratches.ctypes.data

        def tiles(x: _Array, out: _Array, _kept: _Array = scratches) -> None:
            run_tiles(x.reshape(-1), weights, bias, out.view(np.uint16), found, address)

        return tiles
    is_dots, max_rows = family.products is Products.DOTS, family.registers.max_rows
    multiply = make_multiply(family.registers, Bf16Dots() if is_dots else Bf16Pairs())
    put_row, number, width = (pair_row, np.uint32, _DEPTH // 2) if is_dots else (widen_row, np.float32, _DEPTH)

    @jit()
    def run_vectors(x: Any, blocks: Any, weights: Any, bias: Any, out: Any, sums: Any) -> None:
        num_rows = blocks.size // width
        for row in range(num_rows):
            put_row(x[row * width : (row + 1) * width], row, num_rows, max_rows, width, blocks)
        multiply(blocks, num_rows, _DEPTH, weights, bias, 0, num_panels, FLOATS, out, out, sums)

    blocks, sums = aligned_zeros(_MANY_ROWS * width, number), aligned_zeros(PANEL * PANEL, np.float32)

    def vectors(x: _Array, out: _Array) -> None:
        rows = x.view(np.uint32) if is_dots else x
        run_vectors(rows.reshape(-1), blocks[: rows.size], weights, bias, out.view(np.uint16), sums)

    return vectors


def _packed(weights: _Array) -> _Array:
    """See packed_linear.PackedBf16."""
    words = np.ascontiguousarray(weights).view(np.uint32)
    tiles = words.reshape(_COLUMNS // PANEL, 2, 16, _DEPTH // 32, 16).transpose(0, 3, 1, 4, 2)
    packed = aligned_zeros(tiles.size, np.uint32)
    packed[:] = tiles.reshape(-1)
    return packed.view(np.uint16)


def _bf16(values: _Array) -> _Array:
    """The upper halves of float32, which are bf16 numbers"""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def _floats(bits: _Array) -> _Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


if __name__ == "__main__":
    chosen = FAMILIES[sys.argv[1]]
    missing = why_missing(chosen)
    if missing is not None:
        sys.exit(missing)
    sys.stdout.write(json.dumps(measure(chosen)) + "\n")
