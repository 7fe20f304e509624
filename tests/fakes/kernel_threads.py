"""A thread pool for compiled kernels, where this machine can run them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch


@contextlib.contextmanager
def kernel_thread_pool(num_threads: int) -> Iterator[object]:
    """Restores torch's number of threads afterwards. Skips the test without AMX."""
    from shard_server.engines.torch_engine.kernels.amx import request_amx
    from shard_server.engines.torch_engine.kernels.thread_pool import ThreadPool

    if not request_amx():
        pytest.skip("no AMX")
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield ThreadPool()
    finally:
        torch.set_num_threads(before)
