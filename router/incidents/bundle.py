"""Reads an incident log as runs that can be repeated: a state, and the events after it."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Iterable
from typing import Any

import msgspec

from router.incidents.recorded_core import FORMAT_VERSION


@dataclasses.dataclass(slots=True)
class LoggedRun:
    header: bytes
    first: int
    """The number of the first event."""
    began_at: float
    """By the router's clock, in monotonic seconds."""
    versions: dict[str, str]
    state: bytes
    """See checkpoint.py."""
    lines: list[bytes] = dataclasses.field(default_factory=list)

    @property
    def num_seconds(self) -> float:
        return parse(self.lines[-1])[1] - self.began_at if self.lines else 0.0


def read_runs(lines: Iterable[bytes]) -> list[LoggedRun]:
    """All runs with events, oldest first: the lines of a router without a gap. A router that starts again begins
    another one, and so does one that could not write for a while. Raises ValueError for a file of another version."""
    runs: list[LoggedRun] = []
    run: LoggedRun | None = None
    for line in lines:
        try:
            values = parse(line)
        except msgspec.DecodeError:
            run = None  # its writer was killed within the line
            continue
        if isinstance(values[-1], str):
            version, number, now, versions, state = values
            if version != FORMAT_VERSION:
                raise ValueError(f"the log has the version {version}, but this kvloom reads {FORMAT_VERSION}")
            if run is None or number != run.first + len(run.lines):
                run = LoggedRun(line, number, now, versions, base64.b64decode(state))
        elif run is not None and values[0] == run.first + len(run.lines):
            if not run.lines:
                runs.append(run)
            run.lines.append(line)
        else:
            run = None
    return runs


def parse(line: bytes) -> list[Any]:
    """Raises msgspec.DecodeError."""
    return msgspec.json.decode(line)
