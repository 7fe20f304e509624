"""A log file that cannot fill the disk: at most two files of `max_bytes` each, the current one and the previous one."""

from __future__ import annotations

from pathlib import Path
from typing import Final

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
        self._rotate_existing()
        self._file = path.open("wb", buffering=0)

    def write(self, chunk: bytes) -> None:
        for start in range(0, len(chunk), self._max_bytes):
            self._write_piece(chunk[start : start + self._max_bytes])

    def close(self) -> None:
        self._file.close()

    def _write_piece(self, piece: bytes) -> None:
        try:
            if self._file.closed or self._num_bytes + len(piece) > self._max_bytes:
                self._file.close()
                self._rotate_existing()
                self._file = self._path.open("wb", buffering=0)
                self._num_bytes = 0
            self._num_bytes += self._file.write(piece)
        except OSError:  # e.g. a full disk; the next write tries again
            return

    def _rotate_existing(self) -> None:
        if self._path.exists():
            self._path.replace(self._path.with_name(self._path.name + ".1"))
