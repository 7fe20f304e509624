"""Files that only this user can read."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def write_private_file(path: Path, content: bytes) -> None:
    """Replace the file atomically by one of mode 0600. Raises OSError."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}")  # of mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
