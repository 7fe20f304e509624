"""How many threads a shard may compute with, so that the shards of one machine do not compete for its cores.

A thread that waits for another one, which waits for a core, loses more than it brings: two shards with two threads each
on two cores decode at six tenths of the speed that they have with one each, yet a shard alone on two cores is twice as
fast with two. So every shard tells the others, in a file that they all have in memory, while it computes.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final

from kvloom_common.private_file import open_private_file

_NUM_SLOTS: Final = 64
"""The number of engines of a user that share the cores; more do not see one another."""
_PAUSE_NS: Final = 20_000_000
"""An engine still computes if its last step ended this recently: it has only to report its tokens."""
_STALE_NS: Final = 30_000_000_000
"""An engine whose step seems to take longer than this has died in it."""


def num_computing(slots: Sequence[int], own_slot: int, now: int) -> int:
    """The number of engines that compute now, this one included. `slots`, in nanoseconds: the time at which the
    last step ended; for a step that runs, the negative time at which it began; 0 if there was none."""
    others = (moment for slot, moment in enumerate(slots) if moment and slot != own_slot)
    return 1 + sum(now - abs(moment) < (_STALE_NS if moment < 0 else _PAUSE_NS) for moment in others)


def threads_of(num_cores: int, num_engines: int) -> int:
    """The threads of each of `num_engines` that compute at the same time."""
    return max(1, num_cores // num_engines)


class CoreShare:
    """One engine's share of the cores. Used from one thread at a time."""

    def __init__(self, num_cores: int, path: Path) -> None:
        """`num_cores` are shared by all engines that have `path` open. Where it cannot be opened, this engine has them
        all."""
        self.num_cores = num_cores
        self._slots = memoryview(bytearray(_NUM_SLOTS * 8)).cast("q")
        self._own = 0
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(open_private_file(path, os.O_RDWR | os.O_CREAT), "r+b") as file:
                self._own = _claim_slot(file)
                # Not `truncate`: if the disk is full, the first write into a hole of the file would kill this process.
                os.posix_fallocate(file.fileno(), 0, _NUM_SLOTS * 8)
                # This keeps a descriptor of its own, and with it the lock on the slot.
                self._slots = memoryview(mmap.mmap(file.fileno(), _NUM_SLOTS * 8)).cast("q")
        self._slots[self._own] = 0

    def begin(self) -> int:
        """Called before a step; returns the number of threads for it."""
        now = time.monotonic_ns()
        self._slots[self._own] = -now
        return threads_of(self.num_cores, num_computing(self._slots, self._own, now))

    def end(self) -> None:
        """Called after the step."""
        self._slots[self._own] = time.monotonic_ns()


def available_cores() -> int:
    """The cores that this process may use: those of its affinity, or its cgroup's share of them if that is less."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


def _claim_slot(file: IO[bytes]) -> int:
    """A slot that no living engine has. Raises OSError if all are in use."""
    for slot in range(_NUM_SLOTS):
        # A lock of the open file, not of the process, of which another engine may be a part. It ends with the process.
        lock = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, slot, 1, 0)
        with contextlib.suppress(BlockingIOError, PermissionError):
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, lock)
            return slot
    raise OSError("all slots are in use")
