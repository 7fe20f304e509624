"""Log lines about limits in shadow mode, which say whom they would hit: one a minute for each account and limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import structlog

from router.core.lease_messages import LimitCount

log = structlog.get_logger()

SHADOW_OUTCOMES: Final = frozenset({"would_refuse", "would_cap"})
LOG_SECONDS: Final = 60.0
MAX_COUNTED: Final = 10_000
"""Accounts and limits that are counted at a time. When there are more, counting begins again."""


class ShadowLog:
    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._counted: dict[LimitCount, tuple[float, int]] = {}
        """When it was last logged, and how many requests were counted since."""

    def note(self, count: LimitCount) -> None:
        now = self._now()
        logged_at, num_requests = self._counted.get(count, (None, 0))
        num_requests += 1
        if logged_at is None or now - logged_at >= LOG_SECONDS:
            logged_at, logged = now, num_requests
            num_requests = 0
            log.info(
                "shadow_limit_exceeded",
                account=count.account,
                limit=count.kind,
                outcome=count.outcome,
                num_requests=logged,
            )
        if len(self._counted) >= MAX_COUNTED:
            self._counted.clear()
        self._counted[count] = logged_at, num_requests
