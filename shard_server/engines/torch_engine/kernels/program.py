"""The one entry point of compiled code: runs a program (tasks.py) in every thread of a ThreadPool.

There is one for each kernel family, with that family's products and attention; it is compiled when it is first asked
for.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import types as python_types
from pathlib import Path
from typing import Any, NamedTuple

from numba import cfunc, types
from numba.np.numpy_support import carray

from shard_server.engines.torch_engine.checkpoint.converted_model import locked
from shard_server.engines.torch_engine.kernels.adapter_rows import adapt_rows, make_gate_rows
from shard_server.engines.torch_engine.kernels.attention.attend import make_attend_rows
from shard_server.engines.torch_engine.kernels.attention.vectors import vector_multiplies
from shard_server.engines.torch_engine.kernels.codegen.barrier import called, wait_for_all
from shard_server.engines.torch_engine.kernels.codegen.compiled import integers_at, jit
from shard_server.engines.torch_engine.kernels.codegen.group_blocks import PairProducts
from shard_server.engines.torch_engine.kernels.codegen.tasks import (
    ADAPT,
    ATTEND,
    GATE,
    GROUP_PRODUCT,
    GROUP_ROWS,
    HEAD_NORMS,
    INT8_PRODUCT,
    IS_AWAITED,
    KIND,
    LAYER_NORM,
    LOOK_UP,
    LOOK_UP_IN_GROUPS,
    LOOK_UP_IN_HEAD,
    LOOK_UP_IN_INT8_HEAD,
    NORM,
    NOTHING,
    PREPARE,
    PRODUCT,
    ROTATE,
    ROWS,
    SPLIT,
    TASK_SIZE,
)
from shard_server.engines.torch_engine.kernels.families import Family, Products
from shard_server.engines.torch_engine.kernels.products.columns import look_up_columns, look_up_int8_columns
from shard_server.engines.torch_engine.kernels.products.groups import look_up_group_columns, make_group_tasks
from shard_server.engines.torch_engine.kernels.products.outputs import ProductTasks, no_task
from shard_server.engines.torch_engine.kernels.products.vector_tasks import make_dot_tasks, make_float_tasks
from shard_server.engines.torch_engine.kernels.row_kernels import (
    layer_normalise_rows,
    look_up_rows,
    normalise_heads,
    normalise_rows,
    rotate_and_store_rows,
)

CALL_SIZE = 8
TASKS, NUM_TASKS, BARRIER, FOUND, THREAD_NUMBER, NUM_THREADS, SYSTEM_CALL = range(7)
"""The places of a call's arguments: addresses of the program, of a barrier (see barrier.py), of 64 bytes for each
thread, and of C's omp_get_thread_num, omp_get_num_threads (both 0: there is one thread) and syscall."""


class _FamilyTasks(NamedTuple):
    """The compiled functions in which families differ."""

    enter: Any
    """(call, thread): called in every thread before its first task"""
    leave: Any
    """(call, thread): called after the last one"""
    products: ProductTasks
    attend_rows: Any
    gate_rows: Any


@functools.cache
def entry_point(family: Family) -> int:
    """Address of what every thread calls with the address of a call. The code is kept beside this file, or in the
    user's cache directory where that is read-only. Of several shards that start together, one compiles it, which takes
    seconds, and the others wait for the code."""
    signature = types.void(types.CPointer(types.int64))
    run = _entry(digest_of_sources(), family)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # nowhere to wait: each compiles
            cache_dir().mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(cache_dir() / f"compiling-{family.name}.lock"))
        try:
            function = cfunc(signature, cache=True)(run)
        except RuntimeError:  # nowhere to keep the code: each start compiles
            function = cfunc(signature)(run)
    _kept.append(function)
    return int(function.address or 0)


def cache_dir() -> Path:
    """Where this user's engines keep what they measure and share."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvloom"


@functools.cache
def digest_of_sources() -> int:
    """A digest of this package's files: compiled code and what was measured with it are kept until they change."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return int.from_bytes(digest.digest()[:4], "big")


# In the entry point these are the functions of its family: see `_entry`.
_enter: Any = None
_leave: Any = None
_prepare_rows: Any = None
_split_rows: Any = None
_multiply_columns: Any = None
_multiply_int8_columns: Any = None
_group_rows: Any = None
_multiply_group_columns: Any = None
_attend_rows: Any = None
_gate_rows: Any = None


def _entry(version: int, family: Family) -> Any:
    # One function, not several that call one another: LLVM optimises all that a function contains again for each of its
    # callers, which takes a second here.
    def run(data: Any) -> None:
        if version < 0:
            return
        call = carray(data, (CALL_SIZE,))
        thread, num_threads = 0, 1
        if call[THREAD_NUMBER]:
            thread, num_threads = called(call[THREAD_NUMBER]), called(call[NUM_THREADS])
        _enter(call, thread)
        num_arrivals = 0
        for index in range(call[NUM_TASKS]):
            task = carray(integers_at(call[TASKS] + index * TASK_SIZE * 8), (TASK_SIZE,))
            kind = task[KIND] if task[ROWS] else NOTHING
            if kind == PRODUCT:
                _multiply_columns(task, thread, num_threads)
            elif kind == INT8_PRODUCT:
                _multiply_int8_columns(task, thread, num_threads)
            elif kind == GROUP_PRODUCT:
                _multiply_group_columns(task, thread, num_threads)
            elif kind == GROUP_ROWS:
                _group_rows(task, thread, num_threads)
            elif kind == PREPARE:
                _prepare_rows(task, thread, num_threads)
            elif kind == SPLIT:
                _split_rows(task, thread, num_threads)
            elif kind == NORM:
                normalise_rows(task, thread, num_threads)
            elif kind == LAYER_NORM:
                layer_normalise_rows(task, thread, num_threads)
            elif kind == HEAD_NORMS:
                normalise_heads(task, thread, num_threads)
            elif kind == ROTATE:
                rotate_and_store_rows(task, thread, num_threads)
            elif kind == ATTEND:
                _attend_rows(task, thread, num_threads)
            elif kind == LOOK_UP:
                look_up_rows(task, thread, num_threads)
            elif kind == LOOK_UP_IN_HEAD:
                look_up_columns(task, thread, num_threads)
            elif kind == LOOK_UP_IN_INT8_HEAD:
                look_up_int8_columns(task, thread, num_threads)
            elif kind == LOOK_UP_IN_GROUPS:
                look_up_group_columns(task, thread, num_threads)
            elif kind == ADAPT:
                adapt_rows(task, thread, num_threads)
            elif kind == GATE:
                _gate_rows(task, thread, num_threads)
            if task[IS_AWAITED] and num_threads > 1:
                num_arrivals += num_threads
                wait_for_all(call[BARRIER], num_arrivals, call[SYSTEM_CALL])
        _leave(call, thread)

    # numba checks only this file for changes, but the values that a function closes over are part of the cache key, and
    # so is its name. Compiled functions among those values would make another key in every process: the family's are
    # globals of the function's own.
    tasks = _family_tasks(family)
    own_globals = {
        **globals(),
        "_enter": tasks.enter,
        "_leave": tasks.leave,
        "_prepare_rows": tasks.products.prepare_rows,
        "_split_rows": tasks.products.split_rows,
        "_multiply_columns": tasks.products.multiply_columns,
        "_multiply_int8_columns": tasks.products.multiply_int8_columns,
        "_group_rows": tasks.products.group_rows,
        "_multiply_group_columns": tasks.products.multiply_group_columns,
        "_attend_rows": tasks.attend_rows,
        "_gate_rows": tasks.gate_rows,
    }
    named = python_types.FunctionType(run.__code__, own_globals, family.name, None, run.__closure__)
    named.__qualname__ = family.name
    return named


def _family_tasks(family: Family) -> _FamilyTasks:
    if family.products is Products.TILES:
        # Only imported where the CPU has what it is compiled to.
        from shard_server.engines.torch_engine.kernels.attention.amx import AMX
        from shard_server.engines.torch_engine.kernels.products import amx_tasks

        groups = make_group_tasks(family.registers, PairProducts.ACCUMULATED, amx_tasks.SCRATCH_BYTES)
        products = ProductTasks(
            no_task, amx_tasks.split_rows, amx_tasks.multiply_columns, amx_tasks.multiply_int8_columns, *groups
        )
        return _FamilyTasks(
            *_keeping_tile_configuration(), products, make_attend_rows(AMX), make_gate_rows(native=True)
        )
    make_products = make_dot_tasks if family.products is Products.DOTS else make_float_tasks
    attend_rows = make_attend_rows(vector_multiplies(family.registers))
    gate_rows = make_gate_rows(native=False)
    return _FamilyTasks(_nothing, _nothing, make_products(family.registers), attend_rows, gate_rows)


def _keeping_tile_configuration() -> tuple[Any, Any]:
    """`enter` and `leave`: oneDNN uses the same registers with its own configuration, which is restored afterwards."""
    from shard_server.engines.torch_engine.kernels.codegen.amx import load_tile_configuration, store_tile_configuration
    from shard_server.engines.torch_engine.kernels.codegen.compiled import bytes_at

    @jit(variant="amx")
    def enter(call: Any, thread: Any) -> None:
        store_tile_configuration(carray(bytes_at(call[FOUND] + thread * 64), (64,)))

    @jit(variant="amx")
    def leave(call: Any, thread: Any) -> None:
        load_tile_configuration(carray(bytes_at(call[FOUND] + thread * 64), (64,)))

    return enter, leave


@jit()
def _nothing(_call: Any, _thread: Any) -> None:
    pass


_kept: list[Any] = []
"""Keeps compiled functions alive, because their code is freed with them."""
