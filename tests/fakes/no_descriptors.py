"""Takes away all free file descriptors of a process, as a busy neighbour of the same user cannot, but a leak or a flood
of connections does."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path


def first_free_descriptor(pid: int) -> int:
    if pid == os.getpid():  # listing the folder takes a descriptor itself
        lowest = os.dup(0)
        os.close(lowest)
        return lowest
    used = {int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    return next(number for number in range(len(used) + 1) if number not in used)


@contextlib.contextmanager
def no_free_descriptors(*pids: int) -> Iterator[None]:
    """Every open file and socket stays; the next open fails with EMFILE. Without `pids`: in this process."""
    before: dict[int, tuple[int, int]] = {}
    try:
        for pid in pids or (os.getpid(),):
            before[pid] = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (first_free_descriptor(pid), before[pid][1]))
        yield
    finally:
        for pid, limits in before.items():
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
