"""Programs: what the threads of a team compute together, one task after another, without the interpreter.

A task is a row of int64: its kind, the number of rows, addresses and sizes. To make arrays of Python's of them, and to
enter the interpreter between tasks, costs more than most tasks of a decode step do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shard_server.engines.torch_engine.kernels.compiled import jit

LOOK_UP, LOOK_UP_IN_TILES, NORM, HEAD_NORMS, SPLIT, ROTATE, ATTEND, PRODUCT, INT8_PRODUCT = range(9)
_BY_ROWS = (LOOK_UP, LOOK_UP_IN_TILES, NORM, HEAD_NORMS, SPLIT, ROTATE)
"""Of a task of these kinds each thread computes the same rows."""
TASK_SIZE = 16
KIND, ROWS, IS_AWAITED, INPUT = range(4)
"""Places in a task. At INPUT, and behind it, are the addresses of what is another at every step."""

_Array = np.ndarray[Any, Any]


def task(kind: int, num_rows: int, *arguments: int) -> list[int]:
    """The kernel of the kind says what its arguments are."""
    assert len(arguments) <= TASK_SIZE - INPUT
    return [kind, num_rows, 1, *arguments, *[0] * (TASK_SIZE - INPUT - len(arguments))]


def program(tasks: Sequence[list[int]]) -> _Array:
    """int64 [tasks, TASK_SIZE], for ThreadTeam.run. Threads wait for one another after a task, but for those whose rows
    nobody else goes on with."""
    rows = np.array(tasks, np.int64)
    by_rows = np.isin(rows[:, KIND], _BY_ROWS)
    rows[:-1, IS_AWAITED] = ~(by_rows[:-1] & by_rows[1:])
    return rows


def float_bits(value: float) -> int:
    """Of a float32, for a task."""
    return int(np.float32(value).view(np.uint32))


@jit(inline=True)
def share(size: Any, part: Any, num_parts: Any) -> Any:
    """First and end of what `part` computes of `size`."""
    return size * part // num_parts, size * (part + 1) // num_parts
