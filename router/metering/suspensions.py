"""When this process did not run: it was stopped, or its machine was.

A client outside the fabric whose router hangs continues elsewhere, and says how much had arrived. What the router
computes for it when it wakes up arrives nowhere. Otherwise what such a client says is no reason to charge less; but it
is believed of a request that ran while the router did not.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

import msgspec

from kvloom_common.tenancy.usage_record import UsageRecord

LEAST_SECONDS: Final = 3.0
"""Shorter than any client's patience, and longer than an event loop is ever busy with one thing."""
_PERIOD_SECONDS: Final = 0.5


class Suspensions:
    """`watch` is its task."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._last_at = 0.0
        """The end of the last one, in seconds since 1970; 0: there was none."""

    def is_since(self, began_at: float) -> bool:
        """True when a suspension has ended since then."""
        return self._last_at >= began_at

    async def watch(self) -> None:
        """Notice suspensions until cancelled."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(_PERIOD_SECONDS)
            before = self.note(before, time.monotonic())

    def note(self, before: float, now: float) -> float:
        """It ran at both of these times, on a monotonic clock. Returns `now`."""
        if now - before >= LEAST_SECONDS + _PERIOD_SECONDS:
            self._last_at = self._clock()
        return now


def is_believed(record: bytes, suspensions: Suspensions) -> bool:
    """True when what its client says of the lost tokens of a request with this usage record (JSON) counts: that of a
    process of the fabric always."""
    found = msgspec.json.decode(record, type=UsageRecord)
    return not found.answer_id or suspensions.is_since(found.began_at)
