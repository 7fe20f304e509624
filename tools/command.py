"""What the `kvloom` script runs: the command, or one line where what it needs is not installed."""

from __future__ import annotations

import sys

from kvloom.extras import advice_on


def main() -> None:
    try:
        from tools.cli import main as kvloom
    except ModuleNotFoundError as error:
        advice = advice_on(error)
        if advice is None:
            raise
        sys.exit(f"error: {advice}")
    kvloom()
