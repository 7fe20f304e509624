"""Finds kvloom's services and command, which an installation keeps in a private folder.

__init__.py     where that folder is, and how this process and its children come to import from it
__main__.py     the `kvloom` command, and `python -m kvloom_fabric SERVICE` for a single process
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def root() -> Path:
    """The folder with `control`, `edge_http`, `kvloom_common`, `router`, `shard_server`, `safety_svc` and `tools`:
    inside this package when a wheel was installed, the repository in a checkout."""
    installed = Path(__file__).resolve().parent / "_root"
    return installed if installed.is_dir() else Path(__file__).resolve().parents[2]


def import_from_root() -> None:
    """Put `root()` first on the import path of this process and of every Python process that it starts. A user's own
    module called `tools` or `router` can then not be imported by mistake."""
    folder = str(root())
    if sys.path[:1] != [folder]:
        sys.path.insert(0, folder)
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != folder]
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, *inherited])
