"""A process writes down how much it has delivered, for `kvloom usage reconcile`: a count that owes nothing to metering.
Edges count what arrives from routers for their clients, and routers what they send to clients outside the fabric.

A line is written when an answer ends. Lines are written once a second by a thread; a process that is killed loses those
of the last second, and its answers are then without a witness.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec
import structlog

from kvloom_common.private_file import make_own_folder, move_file, open_private_file

log = structlog.get_logger()

FLUSH_SECONDS: Final = 1.0
MAX_WAITING_LINES: Final = 100_000
MAX_BYTES: Final = 256 * 2**20
"""The file is then renamed to its name + ".1", replacing an earlier one."""
FOLDER: Final = "witness"
"""In the data directory."""


class WitnessLine(msgspec.Struct, frozen=True, omit_defaults=True):
    request_id: str
    """That of the request to the routers; of several requests of one answer, what they begin with."""
    num_output_tokens: int
    """The tokens delivered until the answer ended, with those that its client had from another router."""
    is_complete: bool = True
    """True when the answer ended as it should. Otherwise tokens may have been on their way."""
    answer_id: str = ""
    """Tells the requests of clients outside the fabric apart, which choose the ids; see UsageRecord.answer_id."""
    num_prompt_tokens: int = 0
    """The prompt tokens computed before the first new token; 0: not counted."""
    num_resumed_tokens: int = 0
    """The tokens that its client had when it continued the answer here, as far as a ticket proves it."""
    is_settled: bool = False
    """Takes the place of the line of the answer that began behind as many tokens: the client has not received all that
    was sent."""


def witness_files(data_dir: Path) -> list[Path]:
    """Those that the processes of a data directory have written."""
    return sorted((data_dir / FOLDER).glob("*.jsonl*"))


def read_witness(files: Iterable[Path]) -> Iterator[WitnessLine]:
    """The lines of all files. The last one of a process that was killed may be cut off, and is left out. Raises
    OSError."""
    for file in files:
        for line in file.read_bytes().splitlines():
            with contextlib.suppress(msgspec.DecodeError):
                yield msgspec.json.decode(line, type=WitnessLine)


class DeliveryLog:
    """`watch` is its task."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: list[bytes] = []
        self._num_left_out = 0

    def note(self, line: WitnessLine) -> None:
        if len(self._waiting) >= MAX_WAITING_LINES:
            self._num_left_out += 1
            return
        self._waiting.append(msgspec.json.encode(line))

    async def watch(self) -> None:
        """Write until cancelled, and then what is left."""
        try:
            while True:
                await asyncio.sleep(FLUSH_SECONDS)
                await asyncio.to_thread(self.flush)
        finally:
            self.flush()

    def flush(self) -> None:
        lines, self._waiting = self._waiting, []
        if not lines:
            return
        try:
            make_own_folder(self._path.parent)
            if self._path.exists() and self._path.stat().st_size > MAX_BYTES:
                move_file(self._path, self._path.with_name(self._path.name + ".1"))
            fd = open_private_file(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            with os.fdopen(fd, "wb") as file:
                file.write(b"\n".join(lines) + b"\n")
        except OSError as error:
            self._num_left_out += len(lines)
            log.warning("witness_write_failed", cause=str(error), num_left_out=self._num_left_out)
