"""Reporters for the progress of `kvloom up`: to a terminal, a pipe or file, a log, or the command that detached it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import structlog
from rich.console import Console

from tools.supervisor.logs.bounded_log import open_log


def log_to_stderr() -> None:
    """Sends to stderr what parts that services share log in a command, for example about a malformed record in the
    registry: it must not get into the command's output."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))


class Reporter(Protocol):
    def step(self, text: str) -> None:
        """Report a step or an event. The text may have several lines."""
        ...

    def line(self, text: str) -> None:
        """Show the text unchanged."""
        ...

    def ready(self, url: str) -> None:
        """Report that the fabric is ready."""
        ...


class PlainReporter:
    """Prints lines to stdout, and nothing more once its reader has gone, because the fabric outlives it."""

    def step(self, text: str) -> None:
        self.line(f"  {text}")

    def line(self, text: str) -> None:
        with contextlib.suppress(OSError):
            print(text, flush=True)

    def ready(self, url: str) -> None:
        self.line(f"ready: {url}")


class TerminalReporter:
    """Prints in colour, with a spinner until the fabric is ready or this reporter is closed."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._spinner = self._console.status("starting (Ctrl-C stops)", spinner="dots")
        self._spinner.start()

    def step(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._console.print(f"  {text}", style="dim", markup=False)

    def line(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._console.print(text, markup=False)

    def ready(self, url: str) -> None:
        self.close()
        with contextlib.suppress(OSError):
            self._console.print(f"ready: {url}", style="bold green", markup=False)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._spinner.stop()


class LogReporter:
    """Forwards all reports, and writes them to the file that `kvloom logs kvloom` shows."""

    def __init__(self, inner: Reporter, path: Path) -> None:
        """Raises CommandError."""
        self._inner = inner
        self._log = open_log(path)

    def note(self, text: str) -> None:
        """Write to the file only."""
        self._log.write(f"{datetime.now(UTC).isoformat(timespec='milliseconds')} {text}\n".encode())

    def step(self, text: str) -> None:
        self.note(text)
        self._inner.step(text)

    def line(self, text: str) -> None:
        self.note(text)
        self._inner.line(text)

    def ready(self, url: str) -> None:
        self.note(f"ready: {url}")
        self._inner.ready(url)

    def close(self) -> None:
        self._log.close()


class PipeReporter:
    """Sends JSON lines to the command that waits in the foreground, and nothing more once it has exited."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd

    def step(self, text: str) -> None:
        self.send("step", text)

    def line(self, text: str) -> None:
        self.send("line", text)

    def ready(self, url: str) -> None:
        self.send("ready", url)
        self.close()

    def send(self, kind: str, text: str) -> None:
        if self._fd is None:
            return
        try:
            rest = json.dumps([kind, text]).encode() + b"\n"
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            self.close()

    def close(self) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = None


@contextlib.contextmanager
def foreground_reporter() -> Iterator[Reporter]:
    if not sys.stdout.isatty():
        yield PlainReporter()
        return
    reporter = TerminalReporter()
    try:
        yield reporter
    finally:
        reporter.close()
