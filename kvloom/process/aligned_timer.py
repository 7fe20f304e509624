"""When a process does what it does every second or so: all of it at the same moment.

Waking up an idle process costs more than most of what it then does, and what runs first fetches from memory what the
others need, too. Each process has its own moment: they do not crowd the machine together.
"""

from __future__ import annotations

import os
from typing import Final

_MIN_SHARE: Final = 0.1
"""Of the period: timers may be early, and would then go off twice."""
_GOLDEN: Final = 0.618034
"""Multiples of it lie far from one another within a second."""


def seconds_to_aligned_tick(now: float, period_seconds: float, pid: int | None = None) -> float:
    """From `now` (monotonic seconds) to the next moment, a tenth of the period or more. Those of a longer period are
    among those of a shorter one that divides it. `pid`: this process's."""
    phase = (os.getpid() if pid is None else pid) * _GOLDEN % 1.0
    wait = (phase - now) % period_seconds
    return wait if wait >= _MIN_SHARE * period_seconds else wait + period_seconds
