"""The fabric that a command is about."""

from __future__ import annotations

from pathlib import Path

from tools.options import choose_data_dir, load_config_file
from tools.supervisor.state import RunFolder


def running_folder(data_dir: Path | None, config_file: Path | None) -> RunFolder:
    """That of the fabric of the chosen data directory. Raises CommandError if none runs."""
    folder = RunFolder(choose_data_dir(data_dir, load_config_file(config_file)))
    folder.require_running()
    return folder
