"""The files in which one producer keeps its usage records until the control service has them.

A folder DATA_DIR/usage/ROUTER/INCARNATION has
    recent          the latest records (router/metering/recent.py)
    lock            held by the process that writes or finishes the spool
    NUMBER.seg      records from that number on, only ever appended
    progress        the records that there would be of the requests that were running when it was written

Everything here blocks, and is for one thread at a time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from kvloom_common.private_file import make_own_folder, open_private_file, write_private_file
from router.metering import segment

SEGMENT_BYTES: Final = 4 * 2**20
MAX_BYTES: Final = 2**30
"""The size of a spool. With more it counts as a full disk."""
_LOCK: Final = "lock"
_PROGRESS: Final = "progress"

Numbered = tuple[int, bytes]
"""A record's number, and its JSON."""


class SpoolInUseError(Exception):
    """Another process has the spool."""


class Spool:
    """Owns the folder until `close`."""

    def __init__(self, folder: Path, max_bytes: int = MAX_BYTES, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.folder = folder
        self._max_bytes = max_bytes
        self._segment_bytes = segment_bytes
        self._lock: int | None = None
        self._fd: int | None = None
        """The segment that is appended to; None: the next record begins one."""
        self._fd_bytes = 0
        self._segments: list[tuple[int, Path, int]] = []
        """(the first number, the file, its size), in order."""

    def open(self) -> None:
        """Make the folder, or take the one that a dead process has left. Raises SpoolInUseError, OSError."""
        for folder in (self.folder.parent.parent, self.folder.parent, self.folder):
            make_own_folder(folder)
        lock = open_private_file(self.folder / _LOCK, os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise SpoolInUseError(str(self.folder)) from None
        self._lock = lock
        files = [(int(path.stem), path, path.stat().st_size) for path in self.folder.glob("*.seg")]
        self._segments = sorted(files)

    def close(self) -> None:
        """Give up the lock. Another process may finish the spool."""
        self._end_segment()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def remove(self) -> None:
        """Delete the folder: the control service has everything."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.close()
        with contextlib.suppress(OSError):
            self.folder.parent.rmdir()  # the last one of its router

    @property
    def num_bytes(self) -> int:
        return sum(size for _, _, size in self._segments)

    def append(self, records: Sequence[Numbered]) -> None:
        """Returns once they are on the disk. Raises OSError, and then none of them counts as written."""
        if not records:
            return
        if self._lock is None:
            self.open()  # the disk may have failed at the start
        content = b"".join(segment.encode(number, payload) for number, payload in records)
        if self.num_bytes + len(content) > self._max_bytes:
            raise OSError(errno.ENOSPC, "the spool has its full size")
        if self._fd is None or self._fd_bytes >= self._segment_bytes:
            self._begin_segment(records[0][0])
        assert self._fd is not None
        try:
            _write(self._fd, content)
            os.fdatasync(self._fd)
        except OSError:
            self._undo()
            raise
        self._fd_bytes += len(content)
        first, path, _ = self._segments[-1]
        self._segments[-1] = first, path, self._fd_bytes

    def read(self, from_number: int, max_records: int) -> list[Numbered]:
        """The first records from that number on. Raises OSError."""
        found: list[Numbered] = []
        for position, (_, path, _) in enumerate(self._segments):
            if position + 1 < len(self._segments) and self._segments[position + 1][0] <= from_number:
                continue
            for number, payload in segment.decode(path.read_bytes()):
                if number >= from_number:
                    found.append((number, payload))
                    if len(found) == max_records:
                        return found
        return found

    def records(self) -> Iterator[Numbered]:
        """All records. Raises OSError."""
        for _, path, _ in self._segments:
            yield from segment.decode(path.read_bytes())

    def trim(self, number: int) -> None:
        """The control service has all records up to that number: delete the segments that have no others."""
        while len(self._segments) > 1 and self._segments[1][0] <= number + 1:
            self._segments.pop(0)[1].unlink(missing_ok=True)

    def write_progress(self, after_number: int, records: Sequence[bytes]) -> None:
        """Replace the progress of running requests, as of the time when `after_number` was the last record. Raises
        OSError, and the earlier progress stays."""
        content = segment.encode(after_number, b"") + b"".join(segment.encode(0, record) for record in records)
        write_private_file(self.folder / _PROGRESS, content)

    def read_progress(self) -> tuple[int, list[bytes]]:
        """(the last number at that time, the records). Raises OSError."""
        try:
            entries = list(segment.decode((self.folder / _PROGRESS).read_bytes()))
        except FileNotFoundError:
            return 0, []
        return (entries[0][0], [payload for _, payload in entries[1:]]) if entries else (0, [])

    def remove_progress(self) -> None:
        (self.folder / _PROGRESS).unlink(missing_ok=True)

    def _begin_segment(self, first_number: int) -> None:
        self._end_segment()
        path = self.folder / f"{first_number:016d}.seg"
        # A segment of that name has nothing that counts: its first append failed, or the process died in it.
        self._fd = open_private_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._fd_bytes = 0
        self._segments = [entry for entry in self._segments if entry[1] != path]
        self._segments.append((first_number, path, 0))
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _end_segment(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _undo(self) -> None:
        """Removes what an append has written in part: it must not stand before what the next one writes."""
        assert self._fd is not None
        try:
            os.ftruncate(self._fd, self._fd_bytes)
            os.lseek(self._fd, self._fd_bytes, os.SEEK_SET)
        except OSError:
            self._end_segment()


def _write(fd: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(fd, rest) :]
