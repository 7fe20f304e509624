"""The resources that processes have used so far: CPU time, context switches and memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")


def cpu_microseconds(pids: Iterable[int]) -> float:
    """The CPU time of all live threads of the processes, from the scheduler's nanosecond counters
    (/proc/PID/task/*/schedstat). Threads and processes that have ended are not included."""
    return _sum_of_threads(pids, "schedstat", lambda counters: counters.split()[0]) / 1e3


def context_switches(pids: Iterable[int]) -> int:
    """The number of voluntary context switches of all threads: each time a thread slept and had to be woken up."""
    return _sum_of_threads(pids, "status", lambda text: text.partition(b"\nvoluntary_ctxt_switches:")[2].split()[0])


def _sum_of_threads(pids: Iterable[int], file: str, value_in: Callable[[bytes], bytes]) -> int:
    total = 0
    for pid in pids:
        try:
            for thread in os.listdir(_PROC / str(pid) / "task"):
                total += int(value_in((_PROC / str(pid) / "task" / thread / file).read_bytes()))
        except (OSError, IndexError):
            continue
    return total


def rss_bytes(pids: Iterable[int]) -> int:
    """The resident memory. Shared pages count for each process."""
    total = 0
    for pid in pids:
        try:
            pages = int((_PROC / str(pid) / "statm").read_bytes().split()[1])
        except OSError:
            continue
        total += pages * os.sysconf("SC_PAGE_SIZE")
    return total
