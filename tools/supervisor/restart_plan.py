"""Which processes a planned restart is about, and one after another in which order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tools.failures import CommandError
from tools.supervisor.supervised import ProcessStatus

ORDER: Final = ("safety", "shard", "router", "edge", "redis")
"""From within to the door: each process that starts finds what it needs in its new form. Redis, whose memory all that
announce themselves share, comes last and only if it is asked for."""


def plan_restart(processes: Sequence[ProcessStatus], wanted: Sequence[str]) -> list[str]:
    """Names in the order in which they are to be restarted. `wanted` holds names and roles; nothing: all but Redis.
    Raises CommandError for what there is not."""
    known = {word for process in processes for word in (process.name, process.role)}
    unknown = [word for word in wanted if word not in known]
    if unknown:
        there_are = ", ".join(dict.fromkeys(process.name for process in processes))
        raise CommandError(f"there is no process called {', '.join(unknown)}; there are {there_are}")
    chosen = [
        process
        for process in processes
        if (process.name in wanted or process.role in wanted if wanted else process.role != "redis")
    ]
    chosen.sort(key=lambda process: ORDER.index(process.role))  # stable: numbers stay in order
    return list(dict.fromkeys(process.name for process in chosen))
