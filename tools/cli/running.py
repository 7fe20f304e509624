"""The fabric that a command is about."""

from __future__ import annotations

from tools.options import FabricFlags
from tools.supervisor.state import RunFolder


def running_folder(fabric: FabricFlags) -> RunFolder:
    """That of the fabric of the chosen data directory. Raises CommandError if none runs."""
    folder = RunFolder(fabric.home())
    folder.require_running()
    return folder
