"""The contents of a data directory, none of which other users may read or change.

Every process writes its files for its user alone (kvloom_common/private_file.py). `make_data_dir_private` makes it
right for files of earlier versions, of a copy or of a restored backup, and `open_to_others` finds what is not right.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from kvloom_common.private_file import OTHERS, make_private

ENTRIES: Final = (
    "run",
    "logs",
    "tenants",
    "usage",
    "witness",
    "models",
    "models.json",
    "model-history.jsonl",
    "api_keys",
    "control.db",
    "control.db-*",
    "control.db.lock",
    "orchestrator.db",
    "orchestrator.db-*",
    "orchestrator.db.lock",
    "objects",
    "secret",
    "receipts.key",
    "receipts.key.*",
)
"""The names of files and folders. While a file is replaced, the new one is called ".NAME" and something random."""
_KEYS: Final = ("secret", "receipts.key")
"""If others could read one of these, its process refuses to start: a mode that is right again would hide that."""
_NOT_SECRET: Final = ("models", "receipts.key.pub")
"""Weights are many files, and the public keys of receipts are published. The data directory itself protects both from
being changed."""
_MAX_SHOWN: Final = 10_000


def make_data_dir_private(data_dir: Path) -> list[Path]:
    """Take the rights of other users to what the fabric has there, and to the directory itself if it has nothing else:
    a home, or /tmp, is not the fabric's. Returns what was changed. Files that cannot be changed are left out."""
    changed = []
    names = [entry.name for entry in data_dir.iterdir()]
    roots = [data_dir] if all(_is_entry(name) for name in names) else []
    for path in [*roots, *_walk(data_dir, names)]:
        if path.name in _KEYS and path.parent == data_dir:
            continue
        with contextlib.suppress(OSError):  # deleted meanwhile, or another user's
            if make_private(path):
                changed.append(path)
    return changed


def open_to_others(data_dir: Path) -> list[Path]:
    """The files and folders to which other users have rights: the directory, or what the fabric has there. Raises
    OSError."""
    found = [data_dir] if data_dir.stat().st_mode & OTHERS else []
    for path in _walk(data_dir, [entry.name for entry in data_dir.iterdir()]):
        with contextlib.suppress(FileNotFoundError):
            # Of a link's target, because that is what the fabric uses.
            if path.stat().st_mode & OTHERS and len(found) < _MAX_SHOWN:
                found.append(path)
    return found


def _is_entry(name: str) -> bool:
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, f".{pattern}*") for pattern in ENTRIES)


def _walk(data_dir: Path, names: list[str]) -> Iterator[Path]:
    """The fabric's files and folders, and what is in them. Links are not followed."""
    for name in names:
        if not _is_entry(name) or name in _NOT_SECRET:
            continue
        path = data_dir / name
        yield path
        with contextlib.suppress(OSError):
            if not stat.S_ISDIR(path.lstat().st_mode):
                continue
            for folder, folders, files in os.walk(path):
                yield from (Path(folder) / inner for inner in (*folders, *files))
