"""A file of lines: the decision log's, or the incident log's. It is bounded on disk, and in memory while the disk is
slow. The event loop never waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import structlog

from kvloom_common.private_file import move_file, open_private_file
from kvloom_common.process.service import StartError

log = structlog.get_logger()

MAX_WAITING_BYTES: Final = 16 * 2**20
"""The limit for lines that wait to be written; lines beyond it are dropped."""
GATHER_SECONDS: Final = 0.1
"""Lines that arrive within this time are written together."""

MAX_FILE_BYTES: Final = 64 * 2**20

Entry = tuple[bytes, bytes]
"""(header, line): the header is written before the line and at the start of each following file; b"" keeps the previous
header."""


class RotatingFile:
    """Appends lines to `path`. Before the file would exceed `max_bytes` it is renamed to `path` + ".1", replacing an
    earlier one, and a new file begins with the header. It may be used by one thread at a time."""

    def __init__(self, path: Path, max_bytes: int = MAX_FILE_BYTES) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._header = b""
        self._header_is_due = True
        self._num_bytes = 0
        self._fd: int | None = None

    def open(self) -> None:
        """Opens the file for appending. Raises OSError."""
        # Only the owner may read it: a prompt's hashes reveal to readers who know a text whether it was sent.
        self._fd = open_private_file(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        self._header_is_due = True
        self._num_bytes = os.fstat(self._fd).st_size
        if self._num_bytes and os.pread(self._fd, 1, self._num_bytes - 1) != b"\n":
            self._write(b"\n")  # The previous writer was killed within a line.

    def append(self, entries: Sequence[Entry]) -> int:
        """Returns how many lines were left out because they exceed `max_bytes` by themselves. Raises OSError; the lines
        that were not written then are lost, and the next call opens the file again."""
        try:
            return self._append(entries)
        except OSError:
            self.close()
            self._header = next((header for header, _ in reversed(entries) if header), self._header)
            raise

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _append(self, entries: Sequence[Entry]) -> int:
        if self._fd is None:
            self.open()
        pieces: list[bytes] = []
        num_bytes = num_left_out = 0
        for header, line in entries:
            if header:
                self._header, self._header_is_due = header, True
            if len(self._header) + len(line) > self._max_bytes:
                num_left_out += 1
                continue
            piece = self._header + line if self._header_is_due else line
            if self._num_bytes + num_bytes + len(piece) > self._max_bytes:
                self._write(b"".join(pieces))
                self._rotate()
                pieces, num_bytes, piece = [], 0, self._header + line
            self._header_is_due = False
            pieces.append(piece)
            num_bytes += len(piece)
        self._write(b"".join(pieces))
        return num_left_out

    def _rotate(self) -> None:
        self.close()
        move_file(self.path, self.path.with_name(self.path.name + ".1"))
        self.open()

    def _write(self, content: bytes) -> None:
        assert self._fd is not None
        rest = memoryview(content)
        while rest:
            written = os.write(self._fd, rest)
            self._num_bytes += written
            rest = rest[written:]


class DecisionWriter:
    """Takes lines without waiting and writes them in a thread. `run` is its task, and `close` ends it."""

    def __init__(
        self,
        file: RotatingFile,
        on_dropped: Callable[[int], None],
        max_waiting_bytes: int = MAX_WAITING_BYTES,
        *,
        config_key: str,
    ) -> None:
        """`config_key` says for people which key of the configuration wants the file."""
        self._file = file
        self._config_key = config_key
        self._on_dropped = on_dropped
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting: list[Entry] = []
        self._num_waiting_bytes = 0
        self._is_failing = False
        self._wake = asyncio.Event()
        self._closing = asyncio.Event()

    def open(self) -> None:
        """Raises StartError when the file cannot be written."""
        try:
            self._file.open()
        except OSError as error:
            raise StartError(f"{self._config_key}: {self._file.path}: {error.strerror}") from error

    def put(self, header: bytes, line: bytes) -> bool:
        """Both end with a line break. Returns False if there was no room, so that both were dropped."""
        size = len(header) + len(line)
        if self._num_waiting_bytes + size > self._max_waiting_bytes or self._closing.is_set():
            self._on_dropped(1)
            return False
        self._waiting.append((header, line))
        self._num_waiting_bytes += size
        self._wake.set()
        return True

    async def run(self) -> None:
        """Runs until `close` is called and the lines that still wait are written."""
        is_last = False
        while not is_last:
            await self._wake.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GATHER_SECONDS):
                    await self._closing.wait()
            is_last = self._closing.is_set()
            self._wake.clear()
            await self._write_waiting()
        self._file.close()

    def close(self) -> None:
        self._closing.set()
        self._wake.set()

    async def _write_waiting(self) -> None:
        entries, self._waiting = self._waiting, []
        try:
            num_dropped = await asyncio.to_thread(self._file.append, entries)
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
            num_dropped = len(entries)
            if not self._is_failing:
                log.warning("decision_write_failed", path=str(self._file.path), cause=str(error))
            self._is_failing = True
        else:
            self._is_failing = False
        self._num_waiting_bytes -= sum(len(header) + len(line) for header, line in entries)
        if num_dropped:
            self._on_dropped(num_dropped)
