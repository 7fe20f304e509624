"""How much memory is available, and whether a model fits into it. Checked before anything is allocated."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from pathlib import Path

import torch

from shard_server.engines.base import EngineError
from shard_server.engines.torch_engine.checkpoint.weights import weight_bytes
from shard_server.engines.torch_engine.config import AttentionConfig, LlamaConfig

_OVERHEAD_BYTES = 128 * 2**20
"""Activations, rotation tables, one layer's weights in two layouts while they are converted."""


def check_memory(
    config: LlamaConfig,
    *,
    dtype: torch.dtype,
    num_blocks: int,
    block_size: int,
    max_model_len: int,
    bits: float | None = None,
) -> None:
    """Raise EngineError unless weights and `num_blocks` KV blocks (0: those of one full window) fit into memory.
    `bits`: see weight_bytes."""
    num_weight_bytes = weight_bytes(config, dtype, bits=bits)
    num_kv_bytes = (num_blocks or -(-max_model_len // block_size)) * kv_block_bytes(config, block_size, dtype)
    available = available_memory_bytes()
    if num_weight_bytes + num_kv_bytes + _OVERHEAD_BYTES > available:
        what = f"{num_blocks} KV blocks" if num_blocks else f"the KV of one sequence of {max_model_len} tokens"
        raise EngineError(
            f"too little memory: the weights need {_gib(num_weight_bytes)}, {what} {_gib(num_kv_bytes)} of memory; "
            f"{_gib(available)} are available (lower num_blocks or max_model_len, or take a smaller model)"
        )


def kv_block_bytes(config: AttentionConfig, block_size: int, dtype: torch.dtype) -> int:
    return config.num_layers * block_size * 2 * config.kv_size * dtype.itemsize


def is_out_of_memory(error: Exception) -> bool:
    """True when memory did not suffice for what was computed."""
    # torch raises a plain RuntimeError when the CPU's allocator fails.
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)


def available_memory_bytes() -> int:
    """The memory that this process may still use: that of the machine, or of its cgroup if that is less."""
    available = _machine_available_bytes()
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            used = int(Path("/sys/fs/cgroup/memory.current").read_text())
            counters = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
            # The page cache counts as used, but the kernel frees it when memory is needed.
            available = min(available, max(int(limit) - used + int(counters["file"]), 0))
    except (OSError, ValueError, KeyError):
        pass  # no cgroup v2 here
    return available


def forget_code() -> None:
    """Remove the code of loaded libraries from this process's resident memory: most of it ran only at the start (51 MiB
    of LLVM, 70 of torch). Code that runs again is read again from the page cache."""
    with contextlib.suppress(OSError, AttributeError, ValueError):
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for line in Path("/proc/self/maps").read_text().splitlines():
            # Code is mapped from a file and never written: other segments hold what the loader has changed.
            if " r-xp " in line and ".so" in line:
                start, end = (int(address, 16) for address in line.split()[0].split("-"))
                advise(start, end - start, mmap.MADV_DONTNEED)


def _machine_available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise EngineError("/proc/meminfo does not contain the available memory")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
