"""Log files as entries, and the entries of several processes in one order. Pure functions and small state machines."""

from __future__ import annotations

import dataclasses
import datetime
import heapq
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

LEVELS: Final = ("debug", "info", "warning", "error", "critical")
MAX_ENTRY_LINES: Final = 1000
"""A longer stack trace is split."""
MAX_RELATED_IDS: Final = 10_000
_CONSOLE: Final = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z) \[(\w+) *\]")
_PAIR: Final = re.compile(r"(?:^| )(\w+)=('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\S*)")
_ID_KEYS: Final = ("request_id", "response_id", "client_request_id")


@dataclasses.dataclass(frozen=True, slots=True)
class LogEntry:
    """A line with a timestamp, and the lines without one that follow it, e.g. a stack trace."""

    process: str
    at: float
    """Unix seconds, never less than that of the process's entry before; 0 before its first timestamp."""
    level: str
    """Empty for a line that is in neither of the two formats."""
    lines: tuple[str, ...]

    def fields(self) -> Mapping[str, Any]:
        """The keys and values of the first line."""
        line = self.lines[0]
        if line.startswith("{"):
            return _json_object(line)
        return {key: value[1:-1] if value[:1] in "'\"" else value for key, value in _PAIR.findall(line)}


class EntryParser:
    """Joins the lines of one process to entries."""

    def __init__(self, process: str) -> None:
        self._process = process
        self._at = 0.0
        self._level = ""
        self._lines: list[str] = []

    def feed(self, line: str) -> LogEntry | None:
        """Returns the entry that ended with the line before, if one did."""
        stamp = _stamp_of(line)
        if stamp is None and self._lines and self._at and len(self._lines) < MAX_ENTRY_LINES:
            self._lines.append(line)
            return None
        ended = self.flush()
        if stamp is not None:
            at, self._level = stamp
            self._at = max(self._at, at)
        self._lines = [line]
        return ended

    def flush(self) -> LogEntry | None:
        """Returns the last entry: no more lines belong to it."""
        if not self._lines:
            return None
        entry = LogEntry(self._process, self._at, self._level, tuple(self._lines))
        self._lines = []
        return entry


def entries_of(process: str, lines: Iterable[str]) -> Iterator[LogEntry]:
    parser = EntryParser(process)
    for line in lines:
        entry = parser.feed(line)
        if entry is not None:
            yield entry
    last = parser.flush()
    if last is not None:
        yield last


def merged(logs: Iterable[Iterable[LogEntry]]) -> Iterator[LogEntry]:
    """All entries in the order of their times. Entries of one process keep their order, even if its clock was set
    back."""
    return heapq.merge(*logs, key=lambda entry: entry.at)


class LiveMerge:
    """Merges entries that arrive while the processes run. An entry waits for `window_seconds`, so that an earlier one
    of another process can still come before it. At most `max_entries` wait."""

    def __init__(self, window_seconds: float, max_entries: int) -> None:
        self._window_seconds = window_seconds
        self._max_entries = max_entries
        self._waiting: list[tuple[float, int, float, LogEntry]] = []
        self._num_added = 0

    def add(self, entry: LogEntry, now: float) -> None:
        self._num_added += 1
        heapq.heappush(self._waiting, (entry.at, self._num_added, now, entry))

    def take(self, now: float) -> Iterator[LogEntry]:
        """The entries that have waited long enough, with all that come before them."""
        ripe = [i for i, (_, _, added_at, _) in enumerate(self._waiting) if now - added_at >= self._window_seconds]
        last = max((self._waiting[i][:2] for i in ripe), default=None)
        while self._waiting and (
            len(self._waiting) > self._max_entries or (last is not None and self._waiting[0][:2] <= last)
        ):
            yield heapq.heappop(self._waiting)[3]


class RequestFilter:
    """Selects the lines of one request by the fabric's id or by the caller's. `learn` is called with all entries before
    `matches`: lines that have only the fabric's id are then found by the caller's as well."""

    def __init__(self, *wanted: str) -> None:
        """Several ids of one request may be given."""
        self._wanted = wanted
        self.request_ids: set[str] = set(wanted)
        """Those that were given and learned."""

    def learn(self, entry: LogEntry) -> None:
        if len(self.request_ids) >= MAX_RELATED_IDS or not any(name in entry.lines[0] for name in self._wanted):
            return
        fields = entry.fields()
        if fields.get("client_request_id") in self._wanted and fields.get("request_id"):
            self.request_ids.add(str(fields["request_id"]))

    def matches(self, entry: LogEntry) -> bool:
        fields = entry.fields()
        found = [str(fields[key]) for key in _ID_KEYS if key in fields]
        # One request of several prompts is one request per prompt in the fabric: ID.0, ID.1, ... Inside the fabric the
        # id of a gRPC client's request ends with @ and the caller.
        return any(not self.request_ids.isdisjoint((name, *_beginnings(name))) for name in found)


def _beginnings(name: str) -> tuple[str, str]:
    return name.rpartition(".")[0], name.rpartition("@")[0]


def level_filter(minimum: str) -> Callable[[LogEntry], bool]:
    """Entries of this level and above, and those without a level."""
    accepted = {"", *LEVELS[LEVELS.index(minimum) :]}
    return lambda entry: entry.level in accepted


def _stamp_of(line: str) -> tuple[float, str] | None:
    """The time and the level of a line of the console's or of the JSON format; None for any other line."""
    if line.startswith("{"):
        record = _json_object(line)
        stamp, level = record.get("timestamp"), record.get("level", "")
    else:
        match = _CONSOLE.match(line)
        stamp, level = match.groups() if match else (None, "")
    if not isinstance(stamp, str):
        return None
    try:
        return datetime.datetime.fromisoformat(stamp).timestamp(), str(level)
    except (ValueError, OverflowError, OSError):
        return None


def _json_object(line: str) -> Mapping[str, Any]:
    try:
        found = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeError):
        return {}
    return found if isinstance(found, dict) else {}
