"""Reads the usage records from the routers' logs while these are being written."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

from lab.chaos.checking.metering import LoggedUsage, parse_usage_record

_MAX_READ_BYTES = 4 * 2**20


class UsageLog:
    """Follows log files that are rotated when they are full. The previous file is `path` + ".1"."""

    def __init__(self, paths: list[Path], others: Collection[str] = ()) -> None:
        """`others`: tenants who are not the users. They may use the same names for requests of their own."""
        self._tails = [_Tail(path) for path in paths]
        self._others = others
        self.records: list[LoggedUsage] = []

    def read(self) -> None:
        """Read what was written since the last call. Blocks while reading."""
        for tail in self._tails:
            found = [record for line in tail.new_lines() if (record := parse_usage_record(line)) is not None]
            self.records += [record for record in found if record.tenant not in self._others]


class _Tail:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._inode = 0
        self._rest = b""

    def new_lines(self) -> Iterator[bytes]:
        try:
            inode = self._path.stat().st_ino
        except OSError:
            return
        if self._inode and inode != self._inode:
            old = self._path.with_name(self._path.name + ".1")
            if old.exists() and old.stat().st_ino == self._inode:
                yield from self._read(old)
            self._position, self._rest = 0, b""
        self._inode = inode
        yield from self._read(self._path)

    def _read(self, path: Path) -> Iterator[bytes]:
        with path.open("rb") as file:
            file.seek(self._position, os.SEEK_SET)
            while piece := file.read(_MAX_READ_BYTES):
                self._position += len(piece)
                *lines, self._rest = (self._rest + piece).split(b"\n")
                yield from lines
