"""`kvloom logs`: shows the logs of the processes."""

from __future__ import annotations

import collections
import os
import time
from pathlib import Path
from typing import Final

import click

from tools.failures import CommandError
from tools.options import choose_data_dir, config_option, data_dir_option, load_config_file, option
from tools.supervisor.state import RunFolder

_POLL_SECONDS: Final = 0.2
_MAX_READ_BYTES: Final = 2**20


@click.command()
@click.argument("name", required=False)
@option("--follow", scope="logs", is_flag=True, help="Continue with new lines until Ctrl-C.")
@option(
    "--lines",
    scope="logs",
    type=click.IntRange(min=0),
    default=50,
    show_default=True,
    help="The number of last lines to show.",
)
@data_dir_option
@config_option
def logs(name: str | None, follow: bool, lines: int, data_dir: Path | None, config_file: Path | None) -> None:
    """Show the log of the process NAME (edge, router, shard-0, safety, redis, or kvloom for the supervisor), or all
    logs."""
    folder = RunFolder(choose_data_dir(data_dir, load_config_file(config_file)))
    paths = sorted(folder.log_dir.glob("*.log"))
    if not paths:
        raise CommandError(f"there are no logs in {folder.log_dir}")
    chosen = [path for path in paths if name in (None, path.stem)]
    if not chosen:
        raise CommandError(f"there is no log of {name}; there are {', '.join(path.stem for path in paths)}")
    width = max(len(path.stem) for path in chosen)
    tails = [LogTail(path, f"{path.stem:{width}} | " if name is None else "") for path in chosen]
    try:
        for tail in tails:
            tail.print_last(lines)
        while follow:
            for tail in tails:
                tail.print_new_lines()
            time.sleep(_POLL_SECONDS)
    except KeyboardInterrupt:
        return
    finally:
        for tail in tails:
            tail.close()


class LogTail:
    """Follows one log across its rotations."""

    def __init__(self, path: Path, prefix: str) -> None:
        self._path = path
        self._prefix = prefix
        self._file = path.open("rb")
        self._unfinished = b""

    def print_last(self, max_lines: int) -> None:
        """Print the current last lines."""
        for line in collections.deque(self._file, maxlen=max_lines):
            self._print(line.rstrip(b"\n"))

    def print_new_lines(self) -> None:
        """Print the lines written since the last call."""
        while chunk := self._file.read(_MAX_READ_BYTES):
            *complete, self._unfinished = (self._unfinished + chunk).split(b"\n")
            self._unfinished = self._unfinished[-_MAX_READ_BYTES:]
            for line in complete:
                self._print(line)
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

    def _print(self, line: bytes) -> None:
        print(f"{self._prefix}{line.decode(errors='replace')}", flush=True)
