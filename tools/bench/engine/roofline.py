"""`kvloom bench engine --roofline`: this machine's limits, as measured with some threads, and the share of them that
the engine reaches."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch

from shard_server.engines.torch_engine.config import LlamaConfig
from shard_server.engines.torch_engine.memory import available_memory_bytes
from tools.bench.engine.model_costs import (
    BYTES_PER_WEIGHT,
    decode_step_bytes,
    decode_step_operations,
    prefill_operations,
)

_MIN_ARRAY_BYTES: Final = 2**30
_MAX_MEMORY_SHARE: Final = 0.25
_BANDWIDTH_PASSES: Final = 6
_FMA_PASSES: Final = 6
_FMA_PASS_SECONDS: Final = 0.04
_MATMUL_SIZES: Final = (512, 1024, 2048)
_CACHES: Final = Path("/sys/devices/system/cpu")


class MachineLimits(msgspec.Struct, frozen=True):
    """The most that this machine can do with `num_threads` threads."""

    num_threads: int
    gb_per_second: float
    """Reading memory."""
    gflop_per_second: float
    """float32 multiplications and additions."""
    gflop_source: str
    """"fma" for a compiled loop of vector instructions, "matmul" for torch's products where there is no compiler."""


def measure_limits(num_threads: int) -> MachineLimits:
    """Takes a few seconds and, for their duration, up to a quarter of the free memory. Each limit is the best of
    several passes."""
    torch.set_num_threads(num_threads)
    gb_per_second = _torch_bandwidth()
    try:
        from tools.bench.engine.roofline_kernels import OPERATIONS_PER_ITERATION, multiply_add, sum_words
    except ImportError:
        return MachineLimits(num_threads, gb_per_second, _matmul_rate(), "matmul")
    with ThreadPoolExecutor(num_threads) as pool:
        gb_per_second = max(gb_per_second, _compiled_bandwidth(pool, num_threads, sum_words))
        rate = _fma_rate(pool, num_threads, multiply_add, OPERATIONS_PER_ITERATION)
    return MachineLimits(num_threads, gb_per_second, rate, "fma")


def decode_shares(
    limits: MachineLimits,
    config: LlamaConfig,
    context_lengths: Sequence[float],
    step_seconds: float,
    dtype: str,
    weight_format: str,
) -> dict[str, float]:
    """Returns the shares of the machine's limits that a step of one token for each of `context_lengths` reaches.
    `dtype` is that of the KV cache. There is no share of the bandwidth for formats whose size is not in
    BYTES_PER_WEIGHT."""
    gb_per_second = None
    if {dtype, weight_format} <= BYTES_PER_WEIGHT.keys():
        per_weight, per_kv_number = BYTES_PER_WEIGHT[weight_format], BYTES_PER_WEIGHT[dtype]
        gb_per_second = decode_step_bytes(config, context_lengths, per_weight, per_kv_number) / step_seconds / 1e9
    return _shares(limits, gb_per_second, decode_step_operations(config, context_lengths) / step_seconds / 1e9)


def prefill_shares(limits: MachineLimits, config: LlamaConfig, num_tokens: int, seconds: float) -> dict[str, float]:
    """Returns the shares that a prompt of `num_tokens` reaches. There is no share of the bandwidth, which it hardly
    needs."""
    return _shares(limits, None, prefill_operations(config, num_tokens) / seconds / 1e9)


def _shares(limits: MachineLimits, gb_per_second: float | None, gflop_per_second: float) -> dict[str, float]:
    shares: dict[str, float] = {}
    if gb_per_second is not None:
        shares = {
            "gb_per_second": round(gb_per_second, 1),
            "of_bandwidth": round(gb_per_second / limits.gb_per_second, 3),
        }
    return shares | {
        "gflop_per_second": round(gflop_per_second, 1),
        "of_float32_peak": round(gflop_per_second / limits.gflop_per_second, 3),
    }


def array_bytes(cache_bytes: int, free_bytes: int) -> int:
    """The size of an array that no cache holds, as far as memory allows. Virtual machines may report the last-level
    cache of a whole host, 480 MB for two cores."""
    return min(max(_MIN_ARRAY_BYTES, 2 * cache_bytes), int(free_bytes * _MAX_MEMORY_SHARE))


def last_level_cache_bytes(root: Path = _CACHES) -> int:
    """The sum of the machine's last-level caches; 0 if unknown."""
    found: dict[tuple[int, str], int] = {}
    for cache in root.glob("cpu[0-9]*/cache/index*"):
        with contextlib.suppress(OSError, ValueError):
            size = (cache / "size").read_text().strip()
            num_bytes = int(size[:-1]) * {"K": 2**10, "M": 2**20, "G": 2**30}[size[-1]]
            key = (int((cache / "level").read_text()), (cache / "shared_cpu_list").read_text().strip())
            found[key] = num_bytes
    last_level = max((level for level, _ in found), default=0)
    return sum(num_bytes for (level, _), num_bytes in found.items() if level == last_level)


def _num_words() -> int:
    return max(array_bytes(last_level_cache_bytes(), available_memory_bytes()) // 8, 2**16)


def _torch_bandwidth() -> float:
    """GB/s of summing an array of float32."""
    numbers = torch.ones(2 * _num_words(), dtype=torch.float32)
    return numbers.nbytes / _best_seconds(numbers.sum, _BANDWIDTH_PASSES) / 1e9


def _compiled_bandwidth(pool: ThreadPoolExecutor, num_threads: int, sum_words: Callable[[Any], int]) -> float:
    words = np.ones(_num_words(), dtype=np.int64)
    parts = np.array_split(words, num_threads)
    sum_words(words[:64])  # compiles
    return words.nbytes / _best_seconds(lambda: list(pool.map(sum_words, parts)), _BANDWIDTH_PASSES) / 1e9


def _fma_rate(
    pool: ThreadPoolExecutor, num_threads: int, multiply_add: Callable[[int], float], operations: int
) -> float:
    """GFLOP/s of all threads."""
    num_iterations = 10_000
    multiply_add(1)  # compiles
    while _best_seconds(functools.partial(multiply_add, num_iterations), 2) < _FMA_PASS_SECONDS:
        num_iterations *= 2
    best = _best_seconds(lambda: list(pool.map(multiply_add, [num_iterations] * num_threads)), _FMA_PASSES)
    return num_threads * num_iterations * operations / best / 1e9


def _matmul_rate() -> float:
    """GFLOP/s of the best of torch's products."""
    rates: list[float] = []
    for size in _MATMUL_SIZES:
        left, right = torch.ones(size, size), torch.ones(size, size)
        rates.append(2 * size**3 / _best_seconds(lambda a=left, b=right: a @ b, 4) / 1e9)
    return max(rates)


def _best_seconds(run: Callable[[], object], num_passes: int) -> float:
    seconds: list[float] = []
    for _ in range(num_passes):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)
