"""The entry point of the `kvloom` script. It prints one line if a required package is not installed."""

from __future__ import annotations

import sys

from kvloom_common.process.extras import MissingPackageError, naming_extras


def main() -> None:
    try:
        with naming_extras():
            from tools.cli.commands import main as kvloom
    except MissingPackageError as error:
        sys.exit(f"error: {error}")
    kvloom()
