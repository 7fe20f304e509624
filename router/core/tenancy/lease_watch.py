"""Decides which leases have to be asked for, renewed or given back, and when."""

from __future__ import annotations

import math
from typing import Final

from router.core.lease_messages import LeaseWant
from router.core.tenancy.accounts import AccountTable, Lease
from router.core.tenancy.limit_plans import LimitPlans

SWEEP_SECONDS: Final = 0.5
"""How often unused leases are given back, and those in use are renewed."""


class LeaseWatch:
    def __init__(self, book: AccountTable, plans: LimitPlans) -> None:
        self._book = book
        self._plans = plans
        self.touched: dict[int, Lease] = {}
        """Leases that may have to be asked for after this event."""
        self.sweep_at = math.inf
        """When `take_wants` has to be called."""

    def begin(self, now: float) -> None:
        """Accounts are in use: sweep them from now on."""
        if self.sweep_at == math.inf:
            self.sweep_at = now + SWEEP_SECONDS

    def touch(self, lease: Lease) -> None:
        self.touched[id(lease)] = lease

    def take_wants(self, now: float) -> list[LeaseWant]:
        """Returns what is to be asked of the owners of limits after this event."""
        if now >= self.sweep_at:
            self._sweep(now)
        if not self.touched:
            return []
        touched, self.touched = self.touched, {}
        return [want for lease in touched.values() if (want := lease.want(now)) is not None]

    def _sweep(self, now: float) -> None:
        self.sweep_at = math.inf
        has_dropped = False
        for account in self._book:
            has_dropped = account.drop_idle_budgets(now) or has_dropped
            if account.is_idle(now):
                self._book.drop(account)
                has_dropped = True
                continue
            self.sweep_at = now + SWEEP_SECONDS
            for lease in account.leases:
                self.touch(lease)
        if has_dropped:
            self._plans.clear()
