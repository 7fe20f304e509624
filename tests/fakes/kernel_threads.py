"""Thread pools of compiled kernels, for the kernel families that this machine can run."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from shard_server.engines.torch_engine.kernels.thread_pool import ThreadPool


def runnable_family_names() -> list[str]:
    """At least one: the generic family runs everywhere."""
    families = pytest.importorskip("shard_server.engines.torch_engine.kernels.families")
    return [family.name for family in families.runnable_families()]


def family_params() -> list[Any]:
    """For `parametrize`: make test runs the fastest and the generic family, whose compilation takes seconds each."""
    fastest, *others = runnable_family_names()
    between = [pytest.param(name, marks=pytest.mark.long) for name in others[:-1]]
    return [fastest, *between, *others[-1:]]


def float32_family_params() -> list[Any]:
    """For `parametrize`: lists of families that compute the same bits; make test runs the two narrowest."""
    names = float32_family_names()
    two = pytest.param(names[-2:], id="two")
    return [two, pytest.param(names, marks=pytest.mark.long, id="all")] if len(names) > 2 else [two]


def float32_family_names() -> list[str]:
    """Those that compute the same bits."""
    families = pytest.importorskip("shard_server.engines.torch_engine.kernels.families")
    arithmetic = families.GENERIC.arithmetic
    return [family.name for family in families.runnable_families() if family.arithmetic == arithmetic]


def new_thread_pool(family_name: str, num_threads: int) -> ThreadPool:
    """Sets torch's number of threads."""
    torch.set_num_threads(num_threads)
    return _thread_pool(family_name, num_threads)


@functools.cache
def _thread_pool(family_name: str, num_threads: int) -> ThreadPool:
    from shard_server.engines.torch_engine.kernels.families import FAMILIES
    from shard_server.engines.torch_engine.kernels.thread_pool import ThreadPool

    assert torch.get_num_threads() == num_threads
    return ThreadPool(FAMILIES[family_name])


@contextlib.contextmanager
def kernel_thread_pool(num_threads: int, family_name: str = "generic") -> Iterator[ThreadPool]:
    """Restores torch's number of threads afterwards."""
    before = torch.get_num_threads()
    try:
        yield new_thread_pool(family_name, num_threads)
    finally:
        torch.set_num_threads(before)
