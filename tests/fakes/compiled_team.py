"""A team of threads for compiled kernels, where this machine can run them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch


@contextlib.contextmanager
def compiled_team(num_threads: int) -> Iterator[object]:
    """torch has as many threads as before when it ends. Skips the test without AMX."""
    from shard_server.engines.torch_engine.kernels.amx import request_amx
    from shard_server.engines.torch_engine.kernels.thread_pool import ThreadTeam

    if not request_amx():
        pytest.skip("no AMX")
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield ThreadTeam()
    finally:
        torch.set_num_threads(before)
