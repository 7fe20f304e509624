"""The order of one tenant's requests of one class when some of them have a TTFT objective: earliest deadline first."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from router.core.live import LiveRequest

PATIENCE_SECONDS: Final = 30.0
"""After this wait a request without an objective goes before those that have one, so that none waits for ever."""


def ttft_order(plain: Callable[[LiveRequest], float], now: float) -> Callable[[LiveRequest], tuple[float, float]]:
    """The urgency for WaitingQueues.take: the lowest goes first. `plain` orders the requests that have no objective, or
    have missed it: saving those that are lost already would only make others late, too."""

    def urgency(live: LiveRequest) -> tuple[float, float]:
        if live.num_attempts or now - live.arrived_at >= PATIENCE_SECONDS:
            return -math.inf, plain(live)
        objectives = live.objectives
        if objectives is not None and now <= objectives.ttft_due:
            return objectives.ttft_due, plain(live)
        return math.inf, plain(live)

    return urgency
