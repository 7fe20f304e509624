"""This router's part of a hard budget: what `control` has granted it counts as spent until it was returned or the usage
records of its requests have arrived. A request reserves the most that it can cost, so nothing is ever overspent."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from router.core.lease_messages import LeaseGrant, LeaseName, LeaseWant
from router.core.tenancy.demand import Demand
from router.core.tenancy.rate_lease import ANSWER_SECONDS, FRESH_SECONDS, RETRY_SECONDS
from router.core.tenancy.verdict import READY, WANTED, LimitVerdict, refused

IDLE_SECONDS: Final = 2.0
"""Units that were not reserved for so long are returned, for other routers."""
MAX_SPARE_SHARE: Final = 16
"""At most so small a share of what is left is leased beyond what waiting requests need."""
NUM_SPARE_REQUESTS: Final = 64
"""So many requests like the last one are meant to find a lease, and more if more come in a second."""
MAX_SPARE_FACTOR: Final = 4
"""With more than so many times what is expected, half of that is returned: demand has fallen, or answers were shorter
than they might have been."""


class BudgetLease:
    """Units are weighted tokens or billionths of the currency.

    What was asked for and not answered is asked for again, under its number, until it is answered: `control` may have
    granted it, or taken back what was returned, and does neither twice."""

    __slots__ = (
        "_ask_at",
        "_demand",
        "_failed_at",
        "_last_need",
        "_look_below",
        "_numbers",
        "_told_at",
        "_unanswered",
        "_used_at",
        "free",
        "limit",
        "name",
        "num_left",
        "reserved",
        "waiting",
    )

    def __init__(self, name: LeaseName, limit: int, numbers: Iterator[int]) -> None:
        """`numbers`: what all budgets of the router number their wants with."""
        self._numbers = numbers
        self._unanswered: LeaseWant | None = None
        self.name = name
        self.limit = limit
        self.free = 0
        """Leased, and reserved by no request."""
        self.reserved = 0
        """By live requests."""
        self.waiting = 0
        """The units that held requests need."""
        self.num_left: int = limit
        """The units that were left for all routers when `control` last said so."""
        self._told_at = -math.inf
        self._ask_at = -math.inf
        self._failed_at = -math.inf
        self._used_at = -math.inf
        self._last_need = 0
        self._demand = Demand()
        self._look_below: float = 0

    @property
    def is_low(self) -> bool:
        """True when it is time to look whether more is to be leased."""
        return self.free < self._look_below

    def verdict(self, need: int, now: float) -> LimitVerdict:
        if self.free >= need:
            return READY
        self._last_need = need
        if self.num_left <= 0 and now - self._told_at < FRESH_SECONDS:
            return refused(0.0)
        if self.is_unreachable(now):
            return refused(RETRY_SECONDS)
        return WANTED

    def is_unreachable(self, now: float) -> bool:
        """True when `control` could not be asked just now, so that it is not known how much is left."""
        return now - self._failed_at < RETRY_SECONDS

    def take(self, need: int, now: float) -> int:
        """There must be so much."""
        self.free -= need
        self.reserved += need
        self._demand.num_taken += need
        self._last_need, self._used_at = need, now
        return need

    def settle(self, reserved: int, used: int) -> None:
        """A request ended. What it used stays leased, until its usage record arrives at `control`."""
        self.reserved -= reserved
        self.free += reserved - used

    def want(self, now: float) -> LeaseWant | None:
        if now < self._ask_at:
            return None
        if self._unanswered is not None:
            self._ask_at = now + ANSWER_SECONDS
            return self._unanswered
        expected = max(self._demand.expected(now), NUM_SPARE_REQUESTS * self._last_need)
        spare = min(expected, max(0, self.num_left) // MAX_SPARE_SHARE)
        wanted = returned = 0
        if self.waiting > self.free:
            wanted = self.waiting - self.free + spare
        elif self.waiting:
            pass
        elif now - self._used_at >= IDLE_SECONDS:
            returned = self.free
        elif 2 * self.free < spare:
            wanted = spare - self.free if now - self._told_at >= FRESH_SECONDS else 0
        elif self.free > MAX_SPARE_FACTOR * expected and now - self._told_at >= IDLE_SECONDS:
            returned = self.free - MAX_SPARE_FACTOR // 2 * expected
        # Until the answer arrives, or it was asked long enough ago, there is no use in another look before the next
        # sweep.
        self._look_below = spare / 2 if 2 * self.free >= spare else 0
        if not (wanted or returned):
            return None
        self.free -= returned
        self._ask_at = now + ANSWER_SECONDS
        held, number = self.free + self.reserved, next(self._numbers)
        self._unanswered = LeaseWant(self.name, self.limit, wanted, returned, held=held, asked_at=now, number=number)
        return self._unanswered

    def on_grant(self, grant: LeaseGrant, now: float) -> None:
        if self._unanswered is None or grant.number != self._unanswered.number:
            return  # it was asked for twice, and has been answered
        self._unanswered = None
        self._ask_at = self._failed_at = -math.inf
        self.free += grant.granted
        self.num_left, self._told_at = grant.remaining, now
        self.limit = grant.limit or self.limit

    def on_failure(self, _num_routers: int, now: float) -> None:
        self._ask_at = now + RETRY_SECONDS
        self._failed_at = now

    def set_limit(self, limit: int) -> None:
        if limit != self.limit:
            self.limit = limit
            self._told_at = -math.inf

    def is_idle(self, now: float) -> bool:
        used = self.free or self.reserved or self.waiting
        return not used and self._unanswered is None and now - self._used_at >= IDLE_SECONDS
