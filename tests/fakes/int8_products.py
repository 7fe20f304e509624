"""Whether this machine can compute with int8 weights: some CPUs add pairs in 16 bits, which the engine rejects."""

from __future__ import annotations

import functools
import os

import pytest

from shard_server.engines.base import EngineError
from shard_server.engines.torch_engine.kernels.codegen.cpu import features, is_arm64
from shard_server.engines.torch_engine.operators.int8_linear import check_int8_products


def skip_unless_exact() -> None:
    """Skip the calling test with a reason if int8 products are not exact here."""
    if reason := _why_not():
        pytest.skip(reason)


@functools.cache
def _why_not() -> str:
    """Do nothing on CPUs on which they must be exact: a fault of the engine must not skip the tests that would find
    it."""
    if not _lacks_instructions():
        return ""
    try:
        check_int8_products()
    except EngineError as error:
        return str(error)
    return ""


def _lacks_instructions() -> bool:
    """x86 CPUs that do not add in 32 bits directly, and those that oneDNN or numba is to play a lesser one on."""
    if os.environ.get("ONEDNN_MAX_CPU_ISA"):
        return True
    return not is_arm64() and features().isdisjoint({"avx512vnni", "avxvnni", "amx-int8"})
