"""A process's own copy of the table of tenants, with which it serves while `control` is away.

The file has the parts of a snapshot and the changes after it, as they arrived, each with its size and checksum. A part
that was cut off, by the end of the process or of the disk, ends the file; what comes before it is an older table.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

import structlog

from kvloom.v1.control_service_pb2 import FollowResponse
from kvloom_common.private_file import make_own_folder, move_file, new_file_beside, open_private_file
from kvloom_common.tenancy.table import TenantTable

log = structlog.get_logger()

_HEADER_BYTES: Final = 8
_SIZE_BYTES: Final = 4
MAX_PART_BYTES: Final = 64 * 2**20
MIN_CHANGES_BYTES: Final = 2**20


def copy_path(data_dir: Path, name: str) -> Path:
    """The copy of a process of that name. The time of its last change is when it was last known to be that of
    `control`: a process that follows the table marks it every few seconds."""
    return data_dir / "tenants" / f"{name}.table"


class TenantFile:
    """Writing never raises: what cannot be written is logged once, and the copy is missing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_whole = False
        """True when the file has a table, to which changes may be added."""
        self._file: IO[bytes] | None = None
        """At its end, once something was added."""
        self._snapshot_bytes = 0
        self._changes_bytes = 0
        self._has_failed = False
        self._new: IO[bytes] | None = None
        """A snapshot that arrives."""
        self._new_path = path
        self._new_bytes = 0

    def load(self) -> tuple[TenantTable, float]:
        """The table, which is empty if there is none, and when it was that of `control` (seconds since 1970)."""
        table = TenantTable()
        try:
            with os.fdopen(open_private_file(self._path, os.O_RDWR), "r+b") as file:
                current_at = os.fstat(file.fileno()).st_mtime
                file.truncate(self._read(file, table))
                file.flush()
                os.utime(file.fileno(), (current_at, current_at))  # the time is what `current_at` means
        except FileNotFoundError:
            return table, 0.0
        except OSError as error:
            self._fail(error)
            return TenantTable(), 0.0
        self._is_whole = not table.is_empty
        return table, current_at

    def _read(self, file: IO[bytes], table: TenantTable) -> int:
        """Apply what the file has, up to the last whole state. Returns where that ends."""
        end = 0
        parts: list[FollowResponse] = []
        while (part := _next_part(file)) is not None:
            parts.append(part)
            if not part.is_complete:
                continue
            if table.is_empty and not parts[0].begins_snapshot:
                break
            for one in parts:
                table.apply(one)
            is_snapshot = parts[0].begins_snapshot
            size = file.tell() - end
            self._snapshot_bytes = size if is_snapshot else self._snapshot_bytes
            self._changes_bytes = 0 if is_snapshot else self._changes_bytes + size
            end = file.tell()
            parts.clear()
        return end

    @property
    def is_bloated(self) -> bool:
        """True when a new snapshot would be smaller."""
        return self._changes_bytes > max(MIN_CHANGES_BYTES, self._snapshot_bytes)

    def append(self, part: FollowResponse) -> None:
        """Add changes to the copy."""
        if self._is_whole:
            with self._failures():
                self._file = self._file or os.fdopen(open_private_file(self._path, os.O_WRONLY | os.O_APPEND), "ab")
                self._changes_bytes += _write(self._file, part)
                self._file.flush()

    def touch(self) -> None:
        """The copy is that of `control` now."""
        if self._is_whole:
            with self._failures():
                os.utime(self._path)

    # -- a snapshot that arrives, beside the copy that there is. It counts once it is complete ------------------------

    def begin_snapshot(self) -> None:
        self.drop_snapshot()
        with self._failures():
            make_own_folder(self._path.parent)
            self._new, self._new_path = new_file_beside(self._path)
            self._new_bytes = 0

    def add_to_snapshot(self, part: FollowResponse) -> None:
        if self._new is not None:
            with self._failures():
                self._new_bytes += _write(self._new, part)

    def complete_snapshot(self) -> IO[bytes] | None:
        """Returns the copy that was replaced, which must be closed. That frees its content, and with many keys takes
        too long for an event loop."""
        file, replaced = self._new, None
        if file is None:
            return None
        with self._failures():
            file.flush()
            replaced = self._file
            if replaced is None:
                with contextlib.suppress(FileNotFoundError):
                    replaced = os.fdopen(open_private_file(self._path, os.O_RDONLY), "rb")
            move_file(self._new_path, self._path)
            self._file, self._new, self._is_whole = file, None, True
            self._snapshot_bytes, self._changes_bytes, self._has_failed = self._new_bytes, 0, False
        return replaced

    def drop_snapshot(self) -> None:
        """It will not be completed."""
        file, self._new = self._new, None
        if file is not None:
            self._close(file)
            with contextlib.suppress(OSError):
                self._new_path.unlink()

    def close(self) -> None:
        self.drop_snapshot()
        self._close(self._file)
        self._file = None

    def _close(self, file: IO[bytes] | None) -> None:
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self.close()
        self._is_whole = False
        if not self._has_failed:
            self._has_failed = True
            log.warning("tenant_file_write_failed", path=str(self._path), cause=error.strerror)


def _write(file: IO[bytes], part: FollowResponse) -> int:
    content = part.SerializeToString()
    header = len(content).to_bytes(_SIZE_BYTES, "little") + zlib.crc32(content).to_bytes(_SIZE_BYTES, "little")
    file.write(header + content)
    return _HEADER_BYTES + len(content)


def _next_part(file: IO[bytes]) -> FollowResponse | None:
    """None at the end of what can be read."""
    header = file.read(_HEADER_BYTES)
    if len(header) < _HEADER_BYTES:
        return None
    size = int.from_bytes(header[:_SIZE_BYTES], "little")
    if size > MAX_PART_BYTES:
        return None
    content = file.read(size)
    if len(content) < size or zlib.crc32(content) != int.from_bytes(header[_SIZE_BYTES:], "little"):
        return None
    return FollowResponse.FromString(content)
