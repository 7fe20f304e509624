"""Programs: lists of tasks that the threads of a ThreadPool compute together without entering the interpreter.

A task is a row of int64: its kind, the number of rows, addresses and sizes. Python objects for tasks, or a return to
the interpreter between tasks, would cost more time than most tasks of a decode step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shard_server.engines.torch_engine.kernels.codegen.compiled import jit

LOOK_UP, LOOK_UP_IN_HEAD, LOOK_UP_IN_INT8_HEAD, NORM, HEAD_NORMS, PREPARE, SPLIT, ROTATE = range(8)
ATTEND, PRODUCT, INT8_PRODUCT, NOTHING, ADAPT, GATE = range(8, 14)
GROUP_ROWS, GROUP_PRODUCT, LOOK_UP_IN_GROUPS, LAYER_NORM = range(14, 18)
_BY_ROWS = (
    *(LOOK_UP, LOOK_UP_IN_HEAD, LOOK_UP_IN_INT8_HEAD, LOOK_UP_IN_GROUPS),
    *(NORM, HEAD_NORMS, PREPARE, SPLIT, GROUP_ROWS, ROTATE, ADAPT, GATE, LAYER_NORM),
)
"""In consecutive tasks of these kinds, each thread computes the same rows."""
TASK_SIZE = 16
KIND, ROWS, IS_AWAITED, INPUT = range(4)
"""Positions in a task. INPUT and the positions after it hold addresses that differ from step to step."""

_Array = np.ndarray[Any, Any]


def task(kind: int, num_rows: int, *arguments: int) -> list[int]:
    """A task of `kind`; the docstring of the kind's kernel lists the arguments."""
    assert len(arguments) <= TASK_SIZE - INPUT
    return [kind, num_rows, 1, *arguments, *[0] * (TASK_SIZE - INPUT - len(arguments))]


def program(tasks: Sequence[list[int]]) -> _Array:
    """int64 [tasks, TASK_SIZE], for ThreadPool.run. Threads wait for one another after a task, except where each thread
    continues with its own rows."""
    rows = np.array(tasks, np.int64)
    by_rows = np.isin(rows[:, KIND], _BY_ROWS)
    rows[:-1, IS_AWAITED] = ~(by_rows[:-1] & by_rows[1:])
    return rows


def float_bits(value: float) -> int:
    """The bits of a float32, as a task stores them."""
    return int(np.float32(value).view(np.uint32))


@jit(inline=True)
def share(size: Any, part: Any, num_parts: Any) -> Any:
    """Start and end of the range of `size` items that `part` of `num_parts` computes."""
    return size * part // num_parts, size * (part + 1) // num_parts
