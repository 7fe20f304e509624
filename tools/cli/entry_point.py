"""What the `kvloom` script runs: the command, or one line where what it needs is not installed."""

from __future__ import annotations

import sys

from kvloom.process.extras import MissingPackageError, naming_extras


def main() -> None:
    try:
        with naming_extras():
            from tools.cli.commands import main as kvloom
    except MissingPackageError as error:
        sys.exit(f"error: {error}")
    kvloom()
