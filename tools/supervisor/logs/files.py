"""Reads the log files of one machine's processes: what they hold, and then what is added. All calls block."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Final

from tools.supervisor.logs.entries import EntryParser, LogEntry, RequestFilter, entries_of, level_filter, merged

SUPERVISOR_LOG: Final = "kvloom"
_MAX_READ_BYTES: Final = 2**20

Filter = Callable[[LogEntry], bool]


@dataclasses.dataclass(frozen=True)
class LogQuery:
    """Says which lines are wanted."""

    processes: frozenset[str] = frozenset()
    """Empty: all."""
    request_ids: tuple[str, ...] = ()
    """Ids of one request. Empty: the lines of all requests, and of none."""
    level: str = ""
    since: float = 0.0
    max_lines: int | None = None
    """The number of last lines. None: all."""


def log_paths(log_dir: Path, name_prefix: str = "") -> dict[str, Path]:
    """The logs by the names of their processes. That of the supervisor has no prefix on the disk."""
    paths = sorted(log_dir.glob("*.log"))
    return {f"{name_prefix}{SUPERVISOR_LOG}" if path.stem == SUPERVISOR_LOG else path.stem: path for path in paths}


class LogReader:
    """Call `first`, then `poll` as often as new lines are wanted, and `close`."""

    def __init__(self, paths: dict[str, Path], query: LogQuery, *, follow: bool = False) -> None:
        """Raises FileNotFoundError if a log has been removed. With `follow`, no line is lost or repeated between
        `first` and `poll`."""
        self._query = query
        self._paths = {name: path for name, path in paths.items() if not query.processes or name in query.processes}
        self._filters: list[Filter] = []
        self._related = RequestFilter(*query.request_ids) if query.request_ids else None
        if query.level:
            self._filters.append(level_filter(query.level))
        if query.since:
            self._filters.append(lambda entry: entry.at >= query.since)
        with contextlib.ExitStack() as stack:
            self._tails = [LogTail(path, name) for name, path in self._paths.items()] if follow else []
            for tail in self._tails:
                stack.callback(tail.close)
            self._closing = stack.pop_all()

    def first(self) -> list[LogEntry]:
        """Returns the lines that the files hold now, in the order of time."""
        ends = dict(zip(self._paths, (tail.start for tail in self._tails), strict=False))
        if self._related is not None:
            for entry in self._everything(ends):
                self._related.learn(entry)
        accepted = (entry for entry in self._everything(ends) if self._accepts(entry))
        return last_entries(accepted, self._query.max_lines)

    def poll(self) -> list[LogEntry]:
        """The entries since the last call, those of each process in their order."""
        return [entry for tail in self._tails for entry in tail.new_entries() if self._accepts(entry)]

    def close(self) -> None:
        self._closing.close()

    def _everything(self, ends: dict[str, int]) -> Iterator[LogEntry]:
        return merged([entries_of(name, _all_lines(path, ends.get(name))) for name, path in self._paths.items()])

    def _accepts(self, entry: LogEntry) -> bool:
        if self._related is not None:
            self._related.learn(entry)
            if not self._related.matches(entry):
                return False
        return all(accepts(entry) for accepts in self._filters)


def last_entries(entries: Iterable[LogEntry], max_lines: int | None) -> list[LogEntry]:
    """Lines are counted, as by `tail`: a long stack trace that is the first entry may have lost its beginning."""
    kept: collections.deque[LogEntry] = collections.deque()
    num_lines = 0
    for entry in entries:
        kept.append(entry)
        num_lines += len(entry.lines)
        while max_lines is not None and kept and num_lines - len(kept[0].lines) >= max_lines:
            num_lines -= len(kept.popleft().lines)
    if max_lines is not None and kept and num_lines > max_lines:
        kept[0] = dataclasses.replace(kept[0], lines=kept[0].lines[num_lines - max_lines :])
    return list(kept)


def chunked(entries: Sequence[LogEntry], max_chars: int) -> Iterator[list[LogEntry]]:
    """Lists of entries that have about so many characters together, at least one entry each."""
    chunk: list[LogEntry] = []
    num_chars = 0
    for entry in entries:
        chunk.append(entry)
        num_chars += sum(map(len, entry.lines))
        if num_chars >= max_chars:
            yield chunk
            chunk, num_chars = [], 0
    if chunk:
        yield chunk


class LogTail:
    """Follows one log from the end of its last complete line on, across its rotations."""

    def __init__(self, path: Path, process: str = "") -> None:
        self._path = path
        self._parser = EntryParser(process or path.stem)
        self._file = path.open("rb")
        self.start = _end_of_last_line(self._file)
        """The position of the file at which the lines of `new_entries` begin."""
        self._file.seek(self.start)
        self._unfinished = b""

    def new_entries(self) -> Iterator[LogEntry]:
        """The entries written since the last call. An entry ends when nothing more was written until the next call."""
        is_idle = True
        while chunk := self._file.read(_MAX_READ_BYTES):
            is_idle = False
            *complete, self._unfinished = (self._unfinished + chunk).split(b"\n")
            self._unfinished = self._unfinished[-_MAX_READ_BYTES:]
            for line in complete:
                entry = self._parser.feed(line.decode(errors="replace"))
                if entry is not None:
                    yield entry
        last = self._parser.flush() if is_idle else None
        if last is not None:
            yield last
        if self._was_rotated():
            self._file.close()
            self._file = self._path.open("rb")

    def close(self) -> None:
        self._file.close()

    def _was_rotated(self) -> bool:
        try:
            return self._path.stat().st_ino != os.fstat(self._file.fileno()).st_ino
        except FileNotFoundError:
            return False


def _all_lines(path: Path, end: int | None = None) -> Iterator[str]:
    """The lines of the previous file and then those of the current one, up to the position `end`."""
    for part, part_end in ((path.with_name(path.name + ".1"), None), (path, end)):
        with contextlib.suppress(FileNotFoundError), part.open("rb") as file:
            position = 0
            for line in file:
                position += len(line)
                if part_end is not None and position > part_end:
                    break
                yield line.rstrip(b"\n").decode(errors="replace")


def _end_of_last_line(file: BinaryIO) -> int:
    size = file.seek(0, os.SEEK_END)
    start = max(0, size - _MAX_READ_BYTES)
    file.seek(start)
    return start + file.read(size - start).rfind(b"\n") + 1
