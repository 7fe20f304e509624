"""This router's part of a limit per minute.

The limit is a bucket in Redis that holds at most a minute's units and fills up evenly. A lease takes units out of it,
may be used for a short time, and what is left goes back. Bucket and leases together never hold more than the limit
(`router/tenancy/rate_leases.py`), so that routers cannot admit more together than one of them could alone.

While Redis cannot be asked, a router has a bucket of its own: the limit divided by the number of routers.
"""

from __future__ import annotations

import math
from typing import Final

from router.core.lease_messages import LeaseGrant, LeaseName, LeaseWant
from router.core.tenancy.demand import Demand
from router.core.tenancy.verdict import READY, WANTED, LimitVerdict, refused

LEASE_SECONDS: Final = 2.0
"""How long leased units may be used. Redis counts them as leased for longer than that."""
ANSWER_SECONDS: Final = 5.0
"""A want that has no answer after this is made again. The shell answers every one, if only that it has failed."""
RETRY_SECONDS: Final = 1.0
"""When Redis is asked again after it could not be."""
FRESH_SECONDS: Final = 0.25
"""A request that Redis would have refused so recently is refused without asking again."""
MAX_SPARE_SHARE: Final = 8
"""At most an eighth of the limit is leased beyond what waiting requests need."""


class RateLease:
    """Units are requests or weighted tokens."""

    __slots__ = (
        "_ask_at",
        "_demand",
        "_level",
        "_level_at",
        "_local_level",
        "_local_share",
        "_look_below",
        "_returned",
        "_told_debt",
        "expires_at",
        "limit",
        "local_at",
        "name",
        "units",
        "waiting",
    )

    def __init__(self, name: LeaseName, limit: int) -> None:
        self.name = name
        self.limit = limit
        self.units = 0
        """The units that may be used. Less than 0: more was used than was leased, which Redis has not been told yet."""
        self.expires_at = -math.inf
        self.waiting = 0
        """The units that held requests need."""
        self.local_at: float | None = None
        """When its own bucket was last filled; None: Redis answers."""
        self._local_level = 0.0
        self._local_share = 0.0
        self._returned = 0
        self._level: float = limit
        """The level of the bucket in Redis at the time `_level_at`."""
        self._level_at = -math.inf
        self._ask_at = -math.inf
        """When it may be asked for again."""
        self._told_debt = 0
        """The debt in the want that has no answer yet."""
        self._demand = Demand()
        self._look_below: float = math.inf

    @property
    def is_low(self) -> bool:
        """True when it is time to look whether more is to be leased."""
        return self.units < self._look_below or self.local_at is not None

    @property
    def per_second(self) -> float:
        return self.limit / 60.0

    # -- requests -------------------------------------------------------------------------------------------------

    def has(self, need: int, now: float) -> bool:
        """True when so much is leased: nothing else has to be looked at. If not, `verdict` says more."""
        return need <= self.units and need <= self.limit and now < self.expires_at and self.local_at is None

    def verdict(self, need: int, now: float) -> LimitVerdict:
        need = min(need, self.limit)
        if self.local_at is not None:
            self._fill_local(now)
            missing = min(float(need), self._local_share) - self._local_level
            share_per_second = self._local_share / 60.0
            return READY if missing <= 0 else refused(missing / share_per_second)
        self._expire(now)
        if self.units >= need:
            return READY
        missing = need - self.units - self._known_level(now)
        if missing > 0 and now - self._level_at < FRESH_SECONDS:
            return refused(missing / self.per_second)
        return WANTED

    def take_leased(self, need: int) -> bool:
        """Take what `has` has found. Returns whether it is time to look whether more is to be leased."""
        self.units -= need
        self._demand.num_taken += need
        return self.units < self._look_below

    def is_short(self, need: int, now: float) -> bool:
        """True when there is too little for a request that does not wait for a lease, as far as it is known here."""
        need = min(need, self.limit)
        if self.local_at is not None:
            return not self.verdict(need, now).is_ready
        return need > self.units + self._known_level(now)

    def take(self, need: int) -> int:
        """Returns what was taken, for `give_back`. More than a minute's limit is never asked of it."""
        need = min(need, self.limit)
        self._demand.num_taken += need
        if self.local_at is not None:
            self._local_level -= need
        else:
            self.units -= need
        return need

    def give_back(self, units: int) -> None:
        """A request used so much less than it had taken, or, below 0, more."""
        if self.local_at is not None:
            self._local_level = min(self._local_level + units, self._local_share)
        elif units > 0 and (self._level < 0 or self._told_debt) and self.units >= 0:
            # It was taken although there was nothing: for another request there is nothing still.
            self._returned += units
        else:
            self.units += units

    # -- the lease ------------------------------------------------------------------------------------------------

    def want(self, now: float) -> LeaseWant | None:
        """Returns what Redis is to be asked now, if anything."""
        if now < self._ask_at:
            return None
        self._expire(now)
        spare = min(self._demand.expected(now), self.limit // MAX_SPARE_SHARE)
        is_low = 2 * self.units < spare
        # Until the answer arrives, or it was asked long enough ago, there is no use in another look before the next
        # sweep.
        self._look_below = 0.0 if is_low else spare / 2
        wanted = 0
        if self.local_at is not None:
            wanted = max(1, self.waiting)
        elif self.units < self.waiting or (is_low and now - self._level_at >= FRESH_SECONDS):
            wanted = max(self.waiting, spare) - max(self.units, 0)
        debt = max(0, -self.units)
        if not (wanted or self._returned or debt):
            return None
        if self.local_at is not None:
            # Redis may have lost everything, but what was used meanwhile and has not been refilled counts.
            debt += max(0, math.ceil(self._local_share - self._local_level))
        self._ask_at = now + ANSWER_SECONDS
        returned, self._returned = self._returned, 0
        if self.local_at is None:
            self.units += debt
            self._told_debt = debt
        held = max(0, self.units)
        return LeaseWant(self.name, self.limit, wanted, returned, debt, held, now)

    def on_grant(self, grant: LeaseGrant, now: float) -> None:
        if self.local_at is not None:
            self.local_at = None
            self.units = 0
        self._ask_at = -math.inf
        self._told_debt = 0
        self.units += grant.granted
        self.expires_at = max(self.expires_at, grant.asked_at + LEASE_SECONDS)
        self._level, self._level_at = grant.remaining, now

    def on_failure(self, num_routers: int, now: float) -> None:
        """Redis cannot be asked. The router's own bucket begins with its share of what Redis had."""
        share = max(1.0, self.limit / max(1, num_routers))
        if self.local_at is None:
            self._local_level = min(share, self._known_level(now) / max(1, num_routers))
            self._local_level += min(0, self.units) - self._told_debt
            self.units = self._told_debt = self._returned = 0
            self.local_at = now
        self._ask_at = now + RETRY_SECONDS
        self._local_share = share
        self._local_level = min(self._local_level, share)

    def set_limit(self, limit: int) -> None:
        if limit != self.limit:
            self.limit = limit
            self._level = min(self._level, limit)
            self._level_at = -math.inf

    def remaining(self, now: float) -> int:
        """Returns what all routers together may still use, as far as it is known here."""
        if self.local_at is not None:
            self._fill_local(now)
            return max(0, int(self._local_level))
        left = self._level + self.units
        if self._level_at != -math.inf:
            left += self.limit * (now - self._level_at) / 60.0
            if left > self.limit + self.units:
                left = self.limit + self.units
        left = int(left)
        return 0 if left < 0 else left if left < self.limit else self.limit

    def reset_seconds(self, now: float) -> float:
        """The time until all of the limit is there again."""
        return (self.limit - self.remaining(now)) / self.per_second

    def is_idle(self, now: float) -> bool:
        """True when nothing is lost if it is forgotten: everything has been refilled, too."""
        if self.units or self._returned or self.waiting or now < self._ask_at:
            return False
        if self.local_at is not None:
            self._fill_local(now)
            return self._local_level >= self._local_share
        return self._known_level(now) >= self.limit

    def _expire(self, now: float) -> None:
        if self.units > 0 and now >= self.expires_at:
            self._returned += self.units
            self.units = 0

    def _known_level(self, now: float) -> float:
        if self._level_at == -math.inf:
            return self._level
        level = self._level + self.limit * (now - self._level_at) / 60.0
        return level if level < self.limit else self.limit

    def _fill_local(self, now: float) -> None:
        assert self.local_at is not None
        added = self._local_share / 60.0 * (now - self.local_at)
        self._local_level = min(self._local_share, self._local_level + added)
        self.local_at = now
