"""How a command fails: with one line on stderr and an exit status that scripts can distinguish."""

from __future__ import annotations

import sys
from typing import IO, Any, Final

import click

EXIT_NOT_RUNNING: Final = 3
EXIT_INCOMPLETE: Final = 4
"""Something does not serve, or could not be asked; the rest was done."""


class CommandError(click.ClickException):
    """`message` tells the user what is wrong and, if that helps, what to do."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # pyrefly: ignore[read-only]  (click reads the instance)

    def show(self, file: IO[Any] | None = None) -> None:
        print(f"error: {self.message}", file=file or sys.stderr)
