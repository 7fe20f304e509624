"""Where the key of receipts is, and the public ones."""

from __future__ import annotations

from pathlib import Path
from typing import Final

KEY_FILE: Final = "receipts.key"


def key_path(configured: str, data_dir: str) -> Path:
    """Where the private key is: the configured file, or that beside the fabric's secret."""
    return Path(configured).expanduser() if configured else Path(data_dir).expanduser() / KEY_FILE


def public_path(path: Path) -> Path:
    return path.with_name(path.name + ".pub")
