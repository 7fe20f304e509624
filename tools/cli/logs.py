"""`kvloom logs`: shows the logs of the processes, merged by time."""

from __future__ import annotations

import collections
import contextlib
import datetime
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Final

import click

from tools.cli.log_entries import (
    LEVELS,
    EntryParser,
    LiveMerge,
    LogEntry,
    RequestFilter,
    entries_of,
    level_filter,
    merged,
)
from tools.failures import CommandError
from tools.options import choose_data_dir, config_option, data_dir_option, load_config_file, option
from tools.supervisor.state import RunFolder

DEFAULT_LINES: Final = 50
_POLL_SECONDS: Final = 0.2
_WINDOW_SECONDS: Final = 0.3
"""How long a new line waits for earlier lines of other processes: they write their lines within 20 ms."""
_MAX_WAITING_ENTRIES: Final = 10_000
_MAX_READ_BYTES: Final = 2**20
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_UNIT_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

Filter = Callable[[LogEntry], bool]


@click.command()
@click.argument("name", required=False)
@option("--process", scope="logs", metavar="NAME", multiple=True, help="Only this process. May be repeated.")
@option("--request-id", scope="logs", metavar="ID", help="Only lines of this request: its id, or its x-request-id.")
@option(
    "--level", scope="logs", type=click.Choice(LEVELS), help="Only lines of this level and above.", show_default=False
)
@option("--since", scope="logs", metavar="TIME", help="Only later lines: a duration (30s, 10m, 2h, 1d) or an ISO time.")
@option("--follow", scope="logs", is_flag=True, help="Continue with new lines until Ctrl-C.")
@option(
    "--lines",
    scope="logs",
    type=click.IntRange(min=0),
    help=f"The number of last lines to show.  [default: {DEFAULT_LINES}; all with --request-id or --since]",
)
@data_dir_option
@config_option
def logs(
    name: str | None,
    process: Sequence[str],
    request_id: str | None,
    level: str | None,
    since: str | None,
    follow: bool,
    lines: int | None,
    data_dir: Path | None,
    config_file: Path | None,
) -> None:
    """Show the logs of all processes in the order of time, or only that of the process NAME (edge, router, shard-0,
    safety, redis, or kvloom for the supervisor)."""
    folder = RunFolder(choose_data_dir(data_dir, load_config_file(config_file)))
    paths = _chosen(folder.log_dir, {*process, *([name] if name is not None else [])})
    filters: list[Filter] = []
    if level is not None:
        filters.append(level_filter(level))
    if since is not None:
        earliest = parse_since(since, time.time())
        filters.append(lambda entry: entry.at >= earliest)
    if request_id is not None:
        selected = RequestFilter(request_id)
        for path in paths:
            for entry in entries_of(path.stem, _all_lines(path)):
                selected.learn(entry)
        filters.append(lambda entry: selected.learn(entry) or selected.matches(entry))
    is_limited = lines is None and request_id is None and since is None
    width = max(len(path.stem) for path in paths) if len(paths) > 1 else 0
    tails = [LogTail(path) for path in paths] if follow else []
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
        for tail in tails:
            stack.callback(tail.close)
        ends = {path: tail.start for path, tail in zip(paths, tails, strict=False)}
        entries = merged([entries_of(path.stem, _all_lines(path, ends.get(path))) for path in paths])
        _print_last(entries, filters, DEFAULT_LINES if is_limited else lines, width)
        if follow:
            _follow(tails, filters, width)


def parse_since(given: str, now: float) -> float:
    """Returns Unix seconds. Raises CommandError."""
    match = _DURATION.fullmatch(given)
    if match is not None:
        return now - float(match[1]) * _UNIT_SECONDS[match[2]]
    try:
        return datetime.datetime.fromisoformat(given).astimezone().timestamp()
    except (ValueError, OverflowError) as error:
        raise CommandError(f"--since {given} is neither a duration such as 10m nor an ISO time") from error


def _chosen(log_dir: Path, names: set[str]) -> list[Path]:
    paths = sorted(log_dir.glob("*.log"))
    if not paths:
        raise CommandError(f"there are no logs in {log_dir}")
    missing = names - {path.stem for path in paths}
    if missing:
        there = ", ".join(path.stem for path in paths)
        raise CommandError(f"there is no log of {', '.join(sorted(missing))}; there are {there}")
    return [path for path in paths if not names or path.stem in names]


def _print_last(entries: Iterable[LogEntry], filters: Sequence[Filter], max_lines: int | None, width: int) -> None:
    """Lines are counted, as by `tail`: a long stack trace that is the first entry shown may have lost its beginning."""
    accepted = (entry for entry in entries if all(accepts(entry) for accepts in filters))
    lines = ((entry, line) for entry in accepted for line in entry.lines)
    for entry, line in collections.deque(lines, maxlen=max_lines):
        _print(entry.process, [line], width)


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


def _follow(tails: Sequence[LogTail], filters: Sequence[Filter], width: int) -> None:
    merge = LiveMerge(_WINDOW_SECONDS, _MAX_WAITING_ENTRIES)
    while True:
        now = time.monotonic()
        for tail in tails:
            for entry in tail.new_entries():
                merge.add(entry, now)
        for entry in merge.take(now):
            if all(accepts(entry) for accepts in filters):
                _print(entry.process, entry.lines, width)
        time.sleep(_POLL_SECONDS)


class LogTail:
    """Follows one log from the end of its last complete line on, across its rotations."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._parser = EntryParser(path.stem)
        self._file = path.open("rb")
        self.start = _end_of_last_line(self._file)
        """What `new_entries` returns begins at this position of the file."""
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


def _end_of_last_line(file: BinaryIO) -> int:
    size = file.seek(0, os.SEEK_END)
    start = max(0, size - _MAX_READ_BYTES)
    file.seek(start)
    return start + file.read(size - start).rfind(b"\n") + 1


def _print(process: str, lines: Iterable[str], width: int) -> None:
    prefix = f"{process:{width}} | " if width else ""
    print("\n".join(f"{prefix}{line}" for line in lines), flush=True)
