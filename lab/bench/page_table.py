"""Writes a bench's table into a documentation page, with the conditions under which it was measured."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path

from tools.failures import CommandError
from tools.interpreter import interpreter_name


def write_between(page: Path, begin: str, end: str, table: str) -> None:
    """Replace the text between the page's two markers with the table. Raises CommandError when a marker is missing."""
    before, begin_found, rest = page.read_text("utf-8").partition(begin)
    _, end_found, after = rest.partition(end)
    if not begin_found or not end_found:
        raise CommandError(f"{page} has no markers {begin} and {end}")
    page.write_text(f"{before}{begin}\n{table}\n{end}{after}", "utf-8")


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
