"""How fast a model uses up its error budget.

A burn rate of 1 uses up the budget exactly: of the requests, 1 - target miss the objective. Two windows are looked at,
as in the chapter "Alerting on SLOs" of Google's SRE Workbook: the slow one tells a lasting fault from a few unlucky
requests, the fast one tells when the fault is over.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

BUCKETS_PER_FAST_WINDOW: Final = 10


class BurnRates(NamedTuple):
    fast: float
    slow: float
    num_requests: int
    """In the slow window."""


class BurnRateWindows:
    """Counts good and bad requests in a ring of buckets, whose size does not depend on the traffic."""

    __slots__ = ("_budget", "_newest", "_num_all", "_num_bad", "bucket_seconds")

    def __init__(self, target: float, fast_window_seconds: float, slow_window_seconds: float) -> None:
        """`target` is the share of requests that must be good, below 1."""
        self._budget = 1.0 - target
        self.bucket_seconds = fast_window_seconds / BUCKETS_PER_FAST_WINDOW
        num_buckets = max(BUCKETS_PER_FAST_WINDOW, math.ceil(slow_window_seconds / self.bucket_seconds))
        self._num_all = [0] * num_buckets
        self._num_bad = [0] * num_buckets
        self._newest = 0
        """The number of the newest bucket, counted from time 0."""

    def add(self, now: float, *, is_good: bool) -> None:
        """`now` is in seconds, and never goes backwards."""
        self._advance(now)
        index = self._newest % len(self._num_all)
        self._num_all[index] += 1
        self._num_bad[index] += not is_good

    def rates(self, now: float) -> BurnRates:
        """A window without requests burns nothing."""
        self._advance(now)
        size = len(self._num_all)
        fast = [(self._newest - age) % size for age in range(BUCKETS_PER_FAST_WINDOW)]
        num_fast, num_fast_bad = sum(self._num_all[i] for i in fast), sum(self._num_bad[i] for i in fast)
        num_slow, num_slow_bad = sum(self._num_all), sum(self._num_bad)
        return BurnRates(self._rate(num_fast_bad, num_fast), self._rate(num_slow_bad, num_slow), num_slow)

    def _rate(self, num_bad: int, num_all: int) -> float:
        return num_bad / num_all / self._budget if num_all else 0.0

    def _advance(self, now: float) -> None:
        """Empty the buckets of the time that has passed."""
        newest, size = int(now // self.bucket_seconds), len(self._num_all)
        for number in range(max(self._newest + 1, newest - size + 1), newest + 1):
            self._num_all[number % size] = self._num_bad[number % size] = 0
        self._newest = max(self._newest, newest)
