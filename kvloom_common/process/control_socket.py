"""The Unix socket at which the supervisor of a machine takes commands: in the run folder of its data directory, which
only the folder's owner can access."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

SOCKET: Final = "control.sock"


def run_folder(data_dir: Path) -> Path:
    """The folder of the `kvloom up` that uses the data directory."""
    return data_dir / "run"


def stored_config(data_dir: Path) -> Path:
    """The completed configuration of that `kvloom up`, which its processes have read."""
    return run_folder(data_dir) / "config.json"


@contextlib.contextmanager
def short_path(directory: Path) -> Iterator[str]:
    """A short alias of a directory, because paths of sockets are limited to about 100 characters. Raises OSError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)
