"""Finds the edges and routers of a machine that do not follow the table of tenants."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from kvloom_common.access.tenant_file import copy_path
from tools.supervisor.supervised_process import ProcessState, ProcessStatus

MAX_BEHIND_SECONDS: Final = 30.0
"""Three times as long as a process that follows the table takes to mark its copy (TOUCH_SECONDS). A restart of control
is over sooner."""


def not_following(data_dir: Path, statuses: Iterable[ProcessStatus], now: float) -> list[str]:
    """One sentence for each running process whose copy was not marked as that of `control` for a while. `now`: seconds
    since 1970."""
    found = []
    for status in statuses:
        if status.role not in ("edge", "router") or status.state != ProcessState.READY:
            continue
        try:
            age = now - copy_path(data_dir, status.name).stat().st_mtime
        except OSError:
            found.append(
                f"{status.name} has no copy of the table of tenants: whether it follows that of control is not known"
            )
            continue
        if age > MAX_BEHIND_SECONDS:
            found.append(
                f"{status.name} has not followed the table of tenants for {age:.0f} s: it serves by an old one "
                f"(kvloom logs {status.name})"
            )
    return found
