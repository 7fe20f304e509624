"""The quantised blocks of a GGUF file as grouped weights (grouped_weight.py), without loss as far as these have room.

Format of blocks: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. Of Q4_K, Q5_K and Q6_K, whose
scales are products of two numbers, the products are rounded to float16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from gguf import GGMLQuantizationType as Type

from shard_server.engines.torch_engine.grouped_weight import GROUP, GroupedWeight, words_of

_Array = np.ndarray[Any, Any]
_Parts = tuple[int, _Array, _Array, _Array | None]
"""Bits, numbers [blocks, numbers of a block], and float32 scales and minima [blocks, groups of a block]"""


def grouped_weight(blocks: _Array, kind: Type) -> GroupedWeight | None:
    """uint8 [rows, bytes of a row] → the weights; None if this kind of block has no such form, or if float16 or the
    groups of a row have no room for them."""
    if kind not in _READERS or blocks.ndim != 2:
        return None
    block_bytes, read = _READERS[kind]
    num_rows = len(blocks)
    bits, numbers, scales, minima = read(np.ascontiguousarray(blocks).reshape(-1, block_bytes))
    numbers, scales = numbers.reshape(num_rows, -1), scales.reshape(num_rows, -1)
    halves = [_halves(scales)] + ([] if minima is None else [_halves(minima.reshape(num_rows, -1))])
    if numbers.shape[1] % GROUP or not all(bool(torch.isfinite(part).all()) for part in halves):
        return None
    return GroupedWeight(bits, words_of(torch.from_numpy(np.ascontiguousarray(numbers)), bits), *halves)


def _halves(values: _Array) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, np.float32)).half()


def _float16(blocks: _Array, at: int) -> _Array:
    """The float16 of each block from byte `at` on, as float32 [blocks, 1]"""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: _Array) -> _Array:
    """[.., n] bytes → [.., 2n]: all lower halves, then all upper ones"""
    return np.concatenate([packed & 15, packed >> 4], -1)


def _read_q4_0(blocks: _Array) -> _Parts:
    scale = _float16(blocks, 0)
    return 4, _nibbles(blocks[:, 2:]), scale, -8 * scale


def _read_q4_1(blocks: _Array) -> _Parts:
    return 4, _nibbles(blocks[:, 4:]), _float16(blocks, 0), _float16(blocks, 2)


def _read_q5_0(blocks: _Array) -> _Parts:
    fifth = np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little")
    return 8, (_nibbles(blocks[:, 6:]) | fifth << 4).astype(np.int8) - np.int8(16), _float16(blocks, 0), None


def _read_q8_0(blocks: _Array) -> _Parts:
    return 8, blocks[:, 2:].view(np.int8), _float16(blocks, 0), None


def _scales_and_minima(blocks: _Array) -> tuple[_Array, _Array]:
    """Reads Q4_K's and Q5_K's, float32 [blocks, 8] each: 12 bytes of 6-bit factors behind two float16."""
    first, second, third = (blocks[:, at : at + 4] for at in (4, 8, 12))
    factors = np.concatenate([first & 63, third & 15 | first >> 6 << 4], 1)
    minima = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], 1)
    return _float16(blocks, 0) * factors, -_float16(blocks, 2) * minima


def _read_q4_k(blocks: _Array) -> _Parts:
    numbers = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 256)
    return 4, numbers, *_scales_and_minima(blocks)


def _read_q5_k(blocks: _Array) -> _Parts:
    lower = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    fifth = blocks[:, 16:48].reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1) & 1
    return 8, (lower | fifth << 4).reshape(-1, 256).view(np.int8), *_scales_and_minima(blocks)


def _read_q6_k(blocks: _Array) -> _Parts:
    lower = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    by = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    upper = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> by & 3
    numbers = (lower | upper << 4).reshape(-1, 256).view(np.int8) - np.int8(32)
    return 8, numbers, _float16(blocks, 208) * blocks[:, 192:208].view(np.int8), None


_READERS: Final[dict[Type, tuple[int, Callable[[_Array], _Parts]]]] = {
    Type.Q4_0: (18, _read_q4_0),
    Type.Q4_1: (20, _read_q4_1),
    Type.Q5_0: (22, _read_q5_0),
    Type.Q8_0: (34, _read_q8_0),
    Type.Q4_K: (144, _read_q4_k),
    Type.Q5_K: (176, _read_q5_k),
    Type.Q6_K: (210, _read_q6_k),
}
"""By kind of block: its bytes, and what reads it."""
