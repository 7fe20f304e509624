"""Runs programs of compiled code on the threads that torch computes with.

torch's OpenMP threads spin for a while after each operator, so other threads would have to share cores with them.
Programs therefore run on torch's own threads, through the entry point that compilers use.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

from shard_server.engines.torch_engine.kernels.codegen.compiled import aligned_zeros
from shard_server.engines.torch_engine.kernels.families import Family, Products
from shard_server.engines.torch_engine.kernels.products.outputs import SCRATCH_FLOATS
from shard_server.engines.torch_engine.kernels.program import (
    BARRIER,
    CALL_SIZE,
    FOUND,
    NUM_TASKS,
    NUM_THREADS,
    SYSTEM_CALL,
    TASKS,
    THREAD_NUMBER,
    entry_point,
)


class ThreadPool:
    """Runs as many threads as torch has, including the caller's. Used from one thread at a time."""

    def __init__(self, family: Family) -> None:
        self.family = family
        library = _library_of_openmp()
        # GNU's OpenMP runtime has this entry point; Intel's and LLVM's have it for compatibility.
        self._parallel = getattr(library, "GOMP_parallel", None)
        self.num_threads = torch.get_num_threads() if self._parallel is not None else 1
        self._entry_point = entry_point(family)
        self._scratches = _new_scratches(family, self.num_threads)
        self.scratches = self._scratches.ctypes.data
        """The address of the scratch memory of matrix products; see amx_tasks.py and vector_tasks.py."""
        self._found = aligned_zeros(64 * self.num_threads, np.uint8)
        self._barrier = aligned_zeros(8, np.int64)
        self._call = np.zeros(CALL_SIZE, np.int64)
        self._call[BARRIER] = self._barrier.ctypes.data
        self._call[FOUND] = self._found.ctypes.data
        if self.num_threads > 1:
            names = {
                THREAD_NUMBER: "omp_get_thread_num",
                NUM_THREADS: "omp_get_num_threads",
                SYSTEM_CALL: "syscall",
            }
            for place, name in names.items():
                self._call[place] = ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
        self._call_address = self._call.ctypes.data
        self._alone: Any = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._entry_point)

    def run(self, tasks: np.ndarray[Any, Any], num_threads: int = 0) -> None:
        """Run a program made by `tasks.program`, on `num_threads` threads if there are as many; 0: on all. Returns when
        they have finished."""
        num_threads = min(num_threads or self.num_threads, self.num_threads)
        self._call[TASKS], self._call[NUM_TASKS] = tasks.ctypes.data, len(tasks)
        self._barrier[:] = 0
        if self.num_threads == 1:  # not of several: OpenMP numbers the others
            self._alone(self._call_address)
        else:
            self._parallel(  # pyrefly: ignore[not-callable]
                ctypes.c_void_p(self._entry_point), ctypes.c_void_p(self._call_address), num_threads, 0
            )


def _library_of_openmp() -> ctypes.CDLL:
    """Where the functions of torch's OpenMP runtime are found: like the linker, among those that all libraries share,
    and else among those that torch's libraries need (on arm64)."""
    library = ctypes.CDLL(None)
    return library if hasattr(library, "GOMP_parallel") else ctypes.CDLL(torch._C.__file__)


def _new_scratches(family: Family, num_threads: int) -> np.ndarray[Any, Any]:
    if family.products is Products.TILES:
        from shard_server.engines.torch_engine.kernels.products.amx_tasks import new_amx_scratches

        return new_amx_scratches(num_threads)
    return aligned_zeros(num_threads * SCRATCH_FLOATS, np.float32)
