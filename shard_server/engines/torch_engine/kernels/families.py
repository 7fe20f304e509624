"""The kernel families: which instructions compute products and attention, and which of them this CPU has."""

from __future__ import annotations

import dataclasses
import enum
from typing import Final

from shard_server.engines.torch_engine.kernels.codegen.cpu import features, has_amx, has_fma, is_arm64
from shard_server.engines.torch_engine.kernels.codegen.vector_blocks import Registers


class Products(enum.Enum):
    """How a family multiplies."""

    TILES = "tiles"
    """AMX: pairs of bf16, and int8 digits, in matrix tiles"""
    DOTS = "dots"
    """The same in vector registers"""
    FLOATS = "floats"
    """In float32, to which weights are widened"""


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    name: str
    """The name, as in the configuration key `shard.torch.kernels`."""
    label: str
    """For people"""
    arithmetic: str
    """Families of the same arithmetic compute the same bits."""
    products: Products
    registers: Registers
    head_step: int
    """The size of a head must be a multiple of this."""

    @property
    def rank(self) -> int:
        """The place in the order of expected speed; 0 is the fastest."""
        return list(FAMILIES).index(self.name)


_FLOAT32: Final = "float32-fma" if has_fma() else "float32"
_ZMM: Final = Registers(lanes=16, number=32, max_rows=12)
_YMM: Final = Registers(lanes=8, number=16, max_rows=6)
_NEON: Final = Registers(lanes=4, number=32, max_rows=6)
_SSE: Final = Registers(lanes=4, number=16, max_rows=6)
AMX: Final = Family("amx", "AMX", "amx", Products.TILES, _ZMM, 32)
AVX512_BF16: Final = Family("avx512_bf16", "AVX-512 BF16", "avx512-bf16", Products.DOTS, _ZMM, 32)
AVX512: Final = Family("avx512", "AVX-512", _FLOAT32, Products.FLOATS, _ZMM, 32)
AVX2: Final = Family("avx2", "AVX2", _FLOAT32, Products.FLOATS, _YMM, 32)
GENERIC: Final = (
    Family("generic", "NEON", _FLOAT32, Products.FLOATS, _NEON, 32)
    if is_arm64()
    else Family("generic", "SSE", _FLOAT32, Products.FLOATS, _SSE, 32)
)
_AVX512: Final = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "fma"})
_NEEDED: Final = {
    "avx512_bf16": _AVX512 | {"avx512bf16", "avx512vnni"},
    "avx512": _AVX512,
    "avx2": frozenset({"avx2", "fma"}),
}
FAMILIES: Final = {family.name: family for family in (AMX, AVX512_BF16, AVX512, AVX2, GENERIC)}


def why_missing(family: Family) -> str | None:
    """Says what this CPU lacks for the family; None if nothing."""
    if family is AMX:
        return None if has_amx() else "this CPU has no AMX"
    missing = _NEEDED.get(family.name, frozenset()) - features()
    return f"this CPU has no {', '.join(sorted(missing))}" if missing else None


def runnable_families() -> list[Family]:
    """Those that this CPU can run, the one that is expected to be the fastest first."""
    return [family for family in FAMILIES.values() if why_missing(family) is None]
