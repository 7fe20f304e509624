"""Runs compiled kernels on the threads that torch computes with.

torch's OpenMP threads spin for a while after each operator: others beside them would share their cores with them. So
the kernels run on the same ones, through the entry point that compilers use.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

_BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class ThreadTeam:
    """As many threads as torch has, of which the caller is one. Used from one thread at a time."""

    def __init__(self) -> None:
        # GNU's runtime, and Intel's and LLVM's, which have its entry points too.
        self._parallel = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
        self.num_threads = torch.get_num_threads() if self._parallel is not None else 1

    def run_compiled(self, function: int, data: int) -> None:
        """Call the C function at the address `function` with `data` in every thread."""
        assert self._parallel is not None
        self._parallel(ctypes.c_void_p(function), ctypes.c_void_p(data), self.num_threads, 0)

    def run(self, task: Callable[[int], None], num_tasks: int) -> None:
        """Call task(0) ... task(num_tasks - 1), each in any of the threads, and wait for them."""
        if num_tasks == 1 or self._parallel is None:
            for index in range(num_tasks):
                task(index)
            return
        indices = iter(range(num_tasks))
        errors: list[BaseException] = []

        def work(_data: int | None) -> None:
            # Each takes what is left, so that all is done even if OpenMP gives fewer threads.
            try:
                for index in indices:
                    task(index)
            except BaseException as error:  # C could not pass it on
                errors.append(error)

        self._parallel(_BODY(work), None, min(self.num_threads, num_tasks), 0)
        if errors:
            raise errors[0]
