"""The latest records, in memory that outlives the process: a mapped file.

A record goes there at once, before its answer's end leaves the router, and into the spool a moment later. So what was
delivered is recorded when the process is killed in between. (A machine that fails may lose that moment.)
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvloom_common.private_file import open_private_file
from router.metering import segment

HALF_BYTES: Final = 2**20
FILE: Final = "recent"
"""In the spool's folder."""


class RecentRecords:
    """Two halves, which are used in turn: one is used again once all of its records are in the spool."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._ends = [0, 0]
        self._last_numbers = [0, 0]
        self._active = 0

    def open(self, folder: Path) -> None:
        """Raises OSError. The blocks are allocated: a disk that gets full later must not kill the process."""
        fd = open_private_file(folder / FILE, os.O_RDWR | os.O_CREAT)
        try:
            os.posix_fallocate(fd, 0, 2 * HALF_BYTES)
            self._memory = mmap.mmap(fd, 2 * HALF_BYTES)
        finally:
            os.close(fd)

    def put(self, number: int, payload: bytes, durable_number: int) -> None:
        """All records up to `durable_number` are in the spool. Where there is no room the record is left out."""
        if self._memory is None:
            return
        entry = segment.encode(number, payload)
        if self._ends[self._active] + len(entry) > HALF_BYTES:
            other = 1 - self._active
            if self._last_numbers[other] > durable_number or len(entry) > HALF_BYTES:
                return
            self._active, self._ends[other] = other, 0
        at = self._active * HALF_BYTES + self._ends[self._active]
        self._memory[at : at + len(entry)] = entry
        self._ends[self._active] += len(entry)
        self._last_numbers[self._active] = number

    def close(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()


def read_recent(folder: Path) -> Iterator[tuple[int, bytes]]:
    """Yields what a dead process has left, in no particular order, and some of it older than the spool. Raises
    OSError."""
    try:
        content = (folder / FILE).read_bytes()
    except FileNotFoundError:
        return
    for at in (0, HALF_BYTES):
        yield from segment.decode(content[at : at + HALF_BYTES])
