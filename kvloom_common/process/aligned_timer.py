"""Aligns the periodic work of a process, so that all of it runs at the same moment.

Waking up an idle process costs more than most of its periodic work does, and the task that runs first loads into the
caches what the others need. Each process has its own moment, so that the processes of a machine do not all wake up at
once.
"""

from __future__ import annotations

import os
from typing import Final

_MIN_SHARE: Final = 0.1
"""The shortest wait, as a share of the period: a timer may fire early, and would otherwise fire twice."""
_GOLDEN: Final = 0.618034
"""The golden ratio's fraction: its multiples, modulo one, lie far from each other."""


def seconds_to_aligned_tick(now: float, period_seconds: float, pid: int | None = None) -> float:
    """Seconds from `now` (monotonic) to the next tick, at least a tenth of the period. The ticks of a period are among
    the ticks of each shorter period that divides it. `pid`: None for this process's."""
    phase = (os.getpid() if pid is None else pid) * _GOLDEN % 1.0
    wait = (phase - now) % period_seconds
    return wait if wait >= _MIN_SHARE * period_seconds else wait + period_seconds
