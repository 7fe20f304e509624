"""The one entry point of compiled code: runs a program (tasks.py) in every thread of a ThreadPool."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

from numba import cfunc, types
from numba.np.numpy_support import carray

from shard_server.engines.torch_engine.kernels.amx import load_tile_configuration, store_tile_configuration
from shard_server.engines.torch_engine.kernels.barrier import called, wait_for_all
from shard_server.engines.torch_engine.kernels.compiled import bytes_at, integers_at, jit
from shard_server.engines.torch_engine.kernels.row_kernels import (
    look_up_rows,
    normalise_heads,
    normalise_rows,
    rotate_and_store_rows,
)
from shard_server.engines.torch_engine.kernels.tasks import (
    ATTEND,
    HEAD_NORMS,
    INT8_PRODUCT,
    IS_AWAITED,
    KIND,
    LOOK_UP,
    LOOK_UP_IN_TILES,
    NORM,
    PRODUCT,
    ROTATE,
    ROWS,
    SPLIT,
    TASK_SIZE,
)
from shard_server.engines.torch_engine.kernels.tile_tasks import (
    attend_rows,
    look_up_columns,
    multiply_columns,
    multiply_int8_columns,
    split_rows,
)

CALL_SIZE = 8
TASKS, NUM_TASKS, BARRIER, FOUND, THREAD_NUMBER, NUM_THREADS, SYSTEM_CALL = range(7)
"""Of a call: addresses of the program, of a barrier (see barrier.py), of 64 bytes for each thread, and of C's
omp_get_thread_num, omp_get_num_threads (both 0: there is one thread) and syscall."""


@functools.cache
def entry_point() -> int:
    """Address of what every thread calls with the address of a call. Compiled when it is first asked for, and kept
    beside this file, or in the user's cache directory where that is read-only."""
    signature = types.void(types.CPointer(types.int64))
    run = _entry(_digest_of_sources())
    try:
        function = cfunc(signature, cache=True)(run)
    except RuntimeError:  # nowhere to keep the code: each start compiles
        function = cfunc(signature)(run)
    _kept.append(function)
    return int(function.address or 0)


def _digest_of_sources() -> int:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return int.from_bytes(digest.digest()[:4], "big")


def _entry(version: int) -> Any:
    # numba checks only this file for changes, but the values that a function closes over are part of the cache key.
    def run(data: Any) -> None:
        if version >= 0:
            _run_tasks(carray(data, (CALL_SIZE,)))

    return run


@jit()
def _run_tasks(call: Any) -> None:
    thread, num_threads = 0, 1
    if call[THREAD_NUMBER]:
        thread, num_threads = called(call[THREAD_NUMBER]), called(call[NUM_THREADS])
    # oneDNN uses the same registers with its own configuration, which is restored afterwards.
    found = carray(bytes_at(call[FOUND] + thread * 64), (64,))
    store_tile_configuration(found)
    num_arrivals = 0
    for index in range(call[NUM_TASKS]):
        task = carray(integers_at(call[TASKS] + index * TASK_SIZE * 8), (TASK_SIZE,))
        if task[ROWS]:
            _compute(task, thread, num_threads)
        if task[IS_AWAITED] and num_threads > 1:
            num_arrivals += num_threads
            wait_for_all(call[BARRIER], num_arrivals, call[SYSTEM_CALL])
    load_tile_configuration(found)


@jit()
def _compute(task: Any, part: Any, num_parts: Any) -> None:
    kind = task[KIND]
    if kind == PRODUCT:
        multiply_columns(task, part, num_parts)
    elif kind == INT8_PRODUCT:
        multiply_int8_columns(task, part, num_parts)
    elif kind == SPLIT:
        split_rows(task, part, num_parts)
    elif kind == NORM:
        normalise_rows(task, part, num_parts)
    elif kind == HEAD_NORMS:
        normalise_heads(task, part, num_parts)
    elif kind == ROTATE:
        rotate_and_store_rows(task, part, num_parts)
    elif kind == ATTEND:
        attend_rows(task, part, num_parts)
    elif kind == LOOK_UP:
        look_up_rows(task, part, num_parts)
    elif kind == LOOK_UP_IN_TILES:
        look_up_columns(task, part, num_parts)


_kept: list[Any] = []
"""Keeps compiled functions alive, because their code is freed with them."""
