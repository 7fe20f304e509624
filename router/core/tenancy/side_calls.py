"""Limits of side calls, which compute no answer: tokenizing, moderation, plans and explanations.

A side call takes one request, and the tokens that it reads, from the limits per minute of its key, its tenant and its
organisation: from all of them or, if one refuses, from none. What it will read is estimated when it arrives, and
corrected when it is known. It has no slot and costs nothing, since slots and budgets are of answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Final

from kvloom.errors import KvloomError
from kvloom.limits_state import LimitsState
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.tenancy.table import TenantTable
from router.core.events import SideCallArrived, SideCallSettled
from router.core.lease_messages import LeaseKind, SideCallDecided
from router.core.tenancy.accounts import Lease
from router.core.tenancy.lease_watch import LeaseWatch
from router.core.tenancy.limit_plan import LimitPlan, RateLimit
from router.core.tenancy.limit_plans import LimitPlans
from router.core.tenancy.limit_refusals import never_admitted, rate_limited
from router.core.tenancy.rate_lease import RateLease

HOLD_SECONDS: Final = 1.0
"""How long a call waits for a lease, as a request does."""
MAX_HELD: Final = 1024
"""The most calls that may wait."""


class _Held:
    """A call that waits for leases."""

    __slots__ = ("event", "plan", "until", "waiting")

    def __init__(self, event: SideCallArrived, plan: LimitPlan, until: float) -> None:
        self.event = event
        self.plan = plan
        self.until = until
        self.waiting: list[tuple[Lease, int]] = []

    def stop_waiting(self) -> None:
        for lease, units in self.waiting:
            lease.waiting -= units
        self.waiting = []


class SideCalls:
    """Those of the Limiter that makes it. `count` and `state_of` are the Limiter's."""

    def __init__(
        self,
        plans: LimitPlans,
        watch: LeaseWatch,
        table: Callable[[], TenantTable],
        count: Callable[[str, str, str], None],
        state_of: Callable[[LimitPlan, float], LimitsState],
    ) -> None:
        self._plans = plans
        self._watch = watch
        self._table = table
        self._count = count
        self._state_of = state_of
        self._held: list[_Held] = []
        """In the order of their arrival."""

    def arrive(self, event: SideCallArrived, now: float) -> SideCallDecided | None:
        """Charge a call. None: it is held, and decided by `on_leases` or `conclude`."""
        plan = self._plans.of(event.key_id, event.tenant, self._table(), now)
        if plan is None:
            return SideCallDecided(event.call_id)
        self._watch.begin(now)
        held = _Held(event, plan, now + HOLD_SECONDS)
        decided = self._decide(held, 1, now, is_last_try=False)
        if decided is None:
            if len(self._held) >= MAX_HELD:
                held.stop_waiting()
                return SideCallDecided(event.call_id, _too_many())
            self._count("all", "held", "")
            self._held.append(held)
        return decided

    def settle(self, event: SideCallSettled, now: float) -> None:
        """A call has read more tokens than it had taken, or fewer. That is not refused: the next ones wait."""
        plan = self._plans.of(event.key_id, event.tenant, self._table(), now)
        if plan is None or not event.num_more_tokens:
            return
        self._watch.begin(now)
        for lease, _ in plan.token_leases:
            lease.give_back(-min(event.num_more_tokens, lease.limit))
            self._watch.touch(lease)

    def on_leases(self, num_routers: int, now: float) -> list[SideCallDecided]:
        """Leases have arrived, or cannot be had: the calls that are decided now."""
        return self._try_again(num_routers, now, is_due=False)

    def conclude(self, num_routers: int, now: float) -> list[SideCallDecided]:
        """Decide the calls that have waited for long enough."""
        if not self._held or now < self._held[0].until:
            return []
        return self._try_again(num_routers, now, is_due=True)

    def next_deadline(self) -> float:
        """The time at which `conclude` has to be called; infinity: not in the present state."""
        return self._held[0].until if self._held else math.inf

    def waiting(self) -> Iterator[tuple[Lease, int]]:
        """Yields what held calls need of leases."""
        for held in self._held:
            yield from held.waiting

    def _try_again(self, num_routers: int, now: float, *, is_due: bool) -> list[SideCallDecided]:
        found: list[SideCallDecided] = []
        for held in self._held[:]:
            is_last_try = now >= held.until
            if is_due and not is_last_try:
                break
            decided = self._decide(held, num_routers, now, is_last_try=is_last_try)
            if decided is not None:
                self._held.remove(held)
                found.append(decided)
        return found

    def _decide(self, held: _Held, num_routers: int, now: float, *, is_last_try: bool) -> SideCallDecided | None:
        held.stop_waiting()
        needs = _needs(held.plan, held.event.num_tokens)
        refusal: KvloomError | None = None
        must_wait = False
        for limit, lease, units in needs:
            if limit.is_shadow:
                continue
            if units > lease.limit:
                refusal = never_admitted(lease.name, lease.limit, units)
                break
            verdict = lease.verdict(units, now)
            if verdict.is_wanted and is_last_try:
                lease.on_failure(num_routers, now)
                verdict = lease.verdict(units, now)
            if verdict.is_wanted:
                must_wait = True
            elif not verdict.is_ready and (
                refusal is None or verdict.retry_after_seconds > refusal.retry_after_seconds
            ):
                refusal = rate_limited(lease.name, lease.limit, verdict.retry_after_seconds)
        if refusal is not None:
            account, _, kind = refusal.limit.rpartition(" ")
            self._count(kind, "refused", account)
            refusal.limits = self._state_of(held.plan, now)
            return SideCallDecided(held.event.call_id, refusal)
        for limit, lease, units in needs:
            if must_wait:
                lease.waiting += units
                held.waiting.append((lease, units))
                self._watch.touch(lease)
                continue
            if limit.is_shadow and lease.is_short(units, now):
                self._count(limit.kind.value, "would_refuse", lease.name.account)
                continue
            lease.take(units)
            if lease.is_low:
                self._watch.touch(lease)
        if must_wait:
            return None
        return SideCallDecided(held.event.call_id, limits=self._state_of(held.plan, now))


def _needs(plan: LimitPlan, num_tokens: int) -> list[tuple[RateLimit, RateLease, int]]:
    found: list[tuple[RateLimit, RateLease, int]] = []
    for limit in plan.rates:
        units = num_tokens if limit.kind is LeaseKind.TOKENS else 1
        if isinstance(limit.lease, RateLease) and units:
            found.append((limit, limit.lease, units))
    return found


def _too_many() -> KvloomError:
    message = "Too many calls wait for their limits to be looked up."
    return KvloomError(ErrorReason.ERROR_REASON_OVERLOADED, message, retry_after_seconds=1.0)
