"""Tells what the CPU that numba compiles for can do.

numba compiles for the CPU that it runs on, unless NUMBA_CPU_NAME and NUMBA_CPU_FEATURES name another one: this is how
the kernels of lesser CPUs are tried out on a better one. Without the latter, which may be empty, numba keeps the
features of this CPU, such as AVX-512's 32 registers.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from typing import Any, Final

import llvmlite.binding
from numba.core import config

_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18
_AMX: Final = ("amx-tile", "amx-bf16", "amx-int8", "avx512bf16", "avx512bw")
_LEVELS: Final = {
    "x86-64": frozenset[str](),
    "x86-64-v2": frozenset[str](),
    "x86-64-v3": frozenset({"avx2", "fma"}),
    "haswell": frozenset({"avx2", "fma"}),
    "x86-64-v4": frozenset({"avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq"}),
}
"""The features, as far as the kernels need them, of the CPU names for which numba need not be given any."""


@functools.cache
def features() -> frozenset[str]:
    """The instruction sets for which numba compiles, by LLVM's names."""
    settings: Any = config
    name, listed = settings.CPU_NAME, settings.CPU_FEATURES
    if listed is not None:
        named = _LEVELS.get(name or "", frozenset())
        return named.union(part[1:] for part in listed.split(",") if part.startswith("+"))
    if name is None or name == "host":
        return frozenset(feature for feature, has in llvmlite.binding.get_host_cpu_features().items() if has)
    return _LEVELS.get(name, frozenset())


def is_arm64() -> bool:
    return platform.machine().lower() in ("aarch64", "arm64")


def has_fma() -> bool:
    """True when a product and a sum are one instruction with one rounding."""
    return is_arm64() or "fma" in features()


@functools.cache
def has_amx() -> bool:
    """True when this CPU has AMX, for bf16 and int8, and Linux lets this process use it."""
    if sys.platform != "linux" or not features().issuperset(_AMX):
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0
