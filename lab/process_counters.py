"""The resources that processes have used so far: CPU time, context switches and memory."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")


def cpu_microseconds(pids: Iterable[int]) -> float:
    """The CPU time of all live threads of the processes, from the scheduler's nanosecond counters
    (/proc/PID/task/*/schedstat). Threads and processes that have ended are not included."""
    nanoseconds = 0
    for pid in pids:
        try:
            for thread in os.listdir(_PROC / str(pid) / "task"):
                nanoseconds += int((_PROC / str(pid) / "task" / thread / "schedstat").read_bytes().split()[0])
        except OSError:
            continue
    return nanoseconds / 1e3


def context_switches(pids: Iterable[int]) -> int:
    """The number of voluntary context switches of all threads: each time a thread slept and had to be woken up."""
    count = 0
    for pid in pids:
        try:
            for thread in os.listdir(_PROC / str(pid) / "task"):
                status = (_PROC / str(pid) / "task" / thread / "status").read_text()
                count += int(status.partition("\nvoluntary_ctxt_switches:")[2].split(maxsplit=1)[0])
        except (OSError, IndexError):
            continue
    return count


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
