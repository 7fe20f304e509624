"""Tables in Markdown, and their places in documentation pages, between the markers

<!-- table: NAME -->
<!-- end table -->
"""

from __future__ import annotations

import datetime
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click

from tools.failures import CommandError
from tools.interpreter import interpreter_name

PAGE: Final = click.Path(path_type=Path, exists=True, dir_okay=False)
"""The type of a flag that names a page."""
END: Final = "<!-- end table -->"


def check_page(page: Path, names: Sequence[str]) -> None:
    """Raises CommandError for a table that has no markers on the page."""
    text = _read(page)
    for name in names:
        if _find(text, name) is None:
            raise CommandError(f"{page}: there is no <!-- table: {name} --> followed by {END}")


def write_table(page: Path, name: str, markdown: str) -> None:
    """Replace the text between the markers of `name`. Raises CommandError."""
    text = _read(page)
    place = _find(text, name)
    if place is None:
        raise CommandError(f"{page}: there is no <!-- table: {name} --> followed by {END}")
    page.write_text(f"{text[: place.start(1)]}\n{markdown}\n{text[place.end(1) :]}")


def _find(text: str, name: str) -> re.Match[str] | None:
    return re.search(rf"<!-- table: {re.escape(name)} -->((?:(?!<!-- table:).)*?){re.escape(END)}", text, re.DOTALL)


def _read(page: Path) -> str:
    try:
        return page.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{page}: {error}") from error


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(heads), *lines[1:]])


def conditions(command: str, num_runs: int) -> str:
    """The command, the date, the machine, and the meaning of ± in a figure; without a final full stop."""
    model = next((line.partition(":")[2].strip() for line in _cpu_info() if line.startswith("model name")), "CPU")
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return (
        f"`{command}`, {today}: {os.cpu_count()} x {model}, Linux {platform.release()}, {interpreter_name()}, load "
        f"average {os.getloadavg()[2]:.1f}; medians of {num_runs} runs ± half the spread"
    )


def _cpu_info() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.is_file() else []
