"""A log file that cannot fill the disk: at most two files of `max_bytes` each, the current one and the previous one."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Final

from kvloom_common.private_file import move_file, open_private_file
from tools.failures import CommandError

MAX_LOG_BYTES: Final = 10 * 2**20


class BoundedLog:
    """Appends bytes to `path`. A file from an earlier run, or one that reaches `max_bytes`, is renamed to `path` +
    ".1".

    Raises OSError if the file cannot be opened. A write that fails (disk full) is dropped: a log must not stop the
    process whose output it keeps. logging.handlers.RotatingFileHandler does not fit: once closing its buffered file
    fails on a full disk it stays broken, it counts characters instead of bytes, and it does not split long writes.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_LOG_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._file = self._new_file()

    def write(self, chunk: bytes) -> None:
        for start in range(0, len(chunk), self._max_bytes):
            self._write_piece(chunk[start : start + self._max_bytes])

    def close(self) -> None:
        self._file.close()

    def _write_piece(self, piece: bytes) -> None:
        try:
            if self._file.closed or self._num_bytes + len(piece) > self._max_bytes:
                self._file.close()
                self._file = self._new_file()
                self._num_bytes = 0
            self._num_bytes += self._file.write(piece)
        except OSError:  # e.g. a full disk; the next write tries again
            return

    def _new_file(self) -> io.FileIO:
        if os.path.lexists(self._path):
            move_file(self._path, self._path.with_name(self._path.name + ".1"))
        return io.FileIO(open_private_file(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w")


def open_log(path: Path) -> BoundedLog:
    """Raises CommandError if it cannot be written."""
    try:
        return BoundedLog(path)
    except OSError as error:
        raise CommandError(f"the log {path} cannot be written: {error.strerror}") from error
