"""This router's part of the requests that may run at the same time. A slot is in use while a request is live."""

from __future__ import annotations

import math
from typing import Final

from router.core.lease_messages import LeaseGrant, LeaseName, LeaseWant
from router.core.tenancy.rate_lease import ANSWER_SECONDS, FRESH_SECONDS, RETRY_SECONDS
from router.core.tenancy.verdict import READY, WANTED, LimitVerdict, refused

RENEW_SECONDS: Final = 10.0
"""Redis counts the slots of a router for three times as long after it has last heard of them."""
ADVICE_SECONDS: Final = 1.0
"""When to retry, if all slots are in use: nobody knows when one will be free."""
SPARE_PART: Final = 4
"""A quarter more than what is in use is leased, so that not every request waits for a slot."""
MAX_SPARE_SHARE: Final = 8
"""At most an eighth of the slots that no router has is leased so."""
SPARE_SECONDS: Final = 1.0
"""How long other free slots are kept."""


class SlotLease:
    __slots__ = (
        "_ask_at",
        "_local_share",
        "_look_below",
        "_num_left",
        "_told_at",
        "held",
        "limit",
        "name",
        "used",
        "waiting",
    )

    def __init__(self, name: LeaseName, limit: int) -> None:
        self.name = name
        self.limit = limit
        self.held = 0
        """The slots that the router has leased, in use or not."""
        self.used = 0
        self.waiting = 0
        """How many held requests need one."""
        self._local_share: int | None = None
        """How many it may use while Redis cannot be asked; None: it answers."""
        self._num_left = limit
        self._told_at = -math.inf
        self._ask_at = -math.inf
        self._look_below = 0.0

    @property
    def is_low(self) -> bool:
        """True when it is time to look whether more are to be leased."""
        return self.held - self.used < self._look_below or self._local_share is not None

    @property
    def has_one(self) -> bool:
        """True when one is leased and free: nothing else has to be looked at. If not, `verdict` says more."""
        return self.used < self.held and self.used < self.limit and self._local_share is None

    def verdict(self, need: int, now: float) -> LimitVerdict:
        if self._local_share is not None:
            return READY if self.used + need <= self._local_share else refused(ADVICE_SECONDS)
        if self.used + need <= min(self.held, self.limit):
            return READY
        if self._num_left <= 0 and now - self._told_at < FRESH_SECONDS:
            return refused(ADVICE_SECONDS)
        return WANTED

    def is_short(self, need: int, now: float) -> bool:
        """True when there are too few for a request that does not wait for a lease, as far as it is known here."""
        if self._local_share is not None:
            return not self.verdict(need, now).is_ready
        return self.used + need > min(self.limit, max(self.held, self.used) + self._num_left)

    def take(self, need: int) -> int:
        self.used += need
        return need

    def give_back(self, units: int) -> None:
        self.used -= units

    def want(self, now: float) -> LeaseWant | None:
        if now < self._ask_at:
            return None
        is_local = self._local_share is not None
        needed = self.used + self.waiting
        spare = min(self.used // SPARE_PART, max(0, self._num_left) // MAX_SPARE_SHARE)
        is_missing = needed > self.held
        is_low = 2 * (self.held - needed) < spare
        self._look_below = 0.0 if is_low else spare / 2
        silent_seconds = now - self._told_at
        is_due = silent_seconds >= RENEW_SECONDS and self.held > 0
        has_excess = self.held > needed + spare and silent_seconds >= SPARE_SECONDS
        wants_spare = is_low and silent_seconds >= FRESH_SECONDS
        if not (is_missing or is_due or has_excess or wants_spare or (is_local and self.used)):
            return None
        self._ask_at = now + ANSWER_SECONDS
        if not is_local:
            self.held = min(self.held, needed + spare)
        held = max(self.held, self.used)
        wanted = max(0, needed + spare - held) if is_missing or wants_spare else 0
        return LeaseWant(self.name, self.limit, wanted, held=held, asked_at=now)

    def on_grant(self, grant: LeaseGrant, now: float) -> None:
        self._local_share = None
        self._ask_at = -math.inf
        self.held = max(self.held, self.used) + grant.granted
        self._num_left, self._told_at = grant.remaining, now

    def on_failure(self, num_routers: int, now: float) -> None:
        self._ask_at = now + RETRY_SECONDS
        self._local_share = max(1, self.limit // max(1, num_routers))

    @property
    def is_local(self) -> bool:
        return self._local_share is not None

    def set_limit(self, limit: int) -> None:
        if limit != self.limit:
            self.limit = limit
            self._told_at = -math.inf

    def is_idle(self, now: float) -> bool:
        return not (self.held or self.used or self.waiting) and now >= self._ask_at
