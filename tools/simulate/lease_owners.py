"""The owners of shared limits, as simulations know them: the buckets and slots of Redis, by the rules of its script
(router/tenancy/rate_leases.py), and the budgets of `control`."""

from __future__ import annotations

from kvloom.v1.control_service_pb2 import BUDGET_UNIT_TOKENS
from kvloom_common.tenancy.table import TenantTable
from router.core.actions import LeasesWanted, RequestEnded
from router.core.events import LeasesGranted
from router.core.lease_messages import LeaseGrant, LeaseKind, LeaseName, LeaseWant
from router.core.tenancy.limiter import Limiter

LEASE_SECONDS = 4.0
"""How long Redis counts units of a rate as leased."""
SLOT_SECONDS = 30.0


class Bucket:
    """A rate of one account."""

    def __init__(self, limit: int, now: float) -> None:
        self.level = float(limit)
        self.at = now
        self.leased: dict[str, tuple[int, float]] = {}
        """Router -> (units, until when)."""

    def lease(self, router: str, want: LeaseWant, now: float) -> LeaseGrant:
        self.level += want.limit / 60.0 * max(0.0, now - self.at) + want.returned - want.debt
        self.at = max(self.at, now)
        self.leased = {name: lease for name, lease in self.leased.items() if lease[1] > now and name != router}
        others = sum(units for units, _ in self.leased.values())
        self.level = min(self.level, float(want.limit - others - want.held))
        granted = max(0, min(want.wanted, int(self.level // 1)))
        self.level -= granted
        if want.held + granted:
            self.leased[router] = (want.held + granted, now + LEASE_SECONDS)
        return LeaseGrant(want.name, granted, int(self.level // 1), asked_at=want.asked_at)


class Slots:
    """The concurrent requests of one account."""

    def __init__(self) -> None:
        self.leased: dict[str, tuple[int, float]] = {}

    def lease(self, router: str, want: LeaseWant, now: float) -> LeaseGrant:
        self.leased = {name: lease for name, lease in self.leased.items() if lease[1] > now and name != router}
        free = want.limit - want.held - sum(slots for slots, _ in self.leased.values())
        granted = max(0, min(want.wanted, free))
        if want.held + granted:
            self.leased[router] = (want.held + granted, now + SLOT_SECONDS)
        return LeaseGrant(want.name, granted, free - granted, asked_at=want.asked_at)


class RateOwner:
    """Redis. `forget` is what a restart without persistence does."""

    def __init__(self) -> None:
        self.buckets: dict[LeaseName, Bucket] = {}
        self.slots: dict[LeaseName, Slots] = {}

    def lease(self, router: str, want: LeaseWant, now: float) -> LeaseGrant:
        if want.name.kind is LeaseKind.SLOTS:
            return self.slots.setdefault(want.name, Slots()).lease(router, want, now)
        bucket = self.buckets.get(want.name)
        if bucket is None:
            bucket = self.buckets[want.name] = Bucket(want.limit, now)
        return bucket.lease(router, want, now)

    def forget(self) -> None:
        self.buckets.clear()
        self.slots.clear()


class SimulatedBudget:
    """One budget. What was granted counts as spent until it is returned or its use is reported."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.spent = 0
        """The units spent by requests that have ended."""
        self.leased: dict[str, int] = {}
        """Router -> what it was granted, less what it returned or reported."""
        self._last_changes: dict[str, tuple[int, int]] = {}
        """Router -> the number of the last change that it asked for, and what it was granted."""

    @property
    def remaining(self) -> int:
        return self.limit - self.spent - sum(self.leased.values())

    def lease(self, router: str, want: LeaseWant) -> LeaseGrant:
        number, granted = self._last_changes.get(router, (0, 0))
        if want.number < number:
            granted = 0  # by a connection that the router has given up
        elif want.number > number:
            self.leased[router] = self.leased.get(router, 0) - want.returned
            granted = max(0, min(want.wanted, self.remaining))
            self.leased[router] += granted
            self._last_changes[router] = want.number, granted
        return LeaseGrant(want.name, granted, max(0, self.remaining), self.limit, want.asked_at, want.number)

    def record(self, router: str, used: int) -> None:
        """The usage record of a request has arrived."""
        self.spent += used
        self.leased[router] = self.leased.get(router, 0) - used

    def lose(self, router: str) -> None:
        """The router is gone, and all its records have arrived."""
        self.leased.pop(router, None)


class BudgetOwner:
    """`control`, whose database loses nothing."""

    def __init__(self) -> None:
        self.budgets: dict[LeaseName, SimulatedBudget] = {}

    def lease(self, router: str, want: LeaseWant) -> LeaseGrant:
        budget = self.budgets.get(want.name)
        if budget is None:
            budget = self.budgets[want.name] = SimulatedBudget(want.limit)
        return budget.lease(router, want)

    def record(self, router: str, ended: RequestEnded) -> None:
        """The usage record of a request has arrived."""
        for charge in () if ended.usage is None else ended.usage.charges:
            kind = LeaseKind.DAY_TOKENS if charge.unit == BUDGET_UNIT_TOKENS else LeaseKind.MONTH_NANOS
            budget = self.budgets.get(LeaseName(charge.account, kind, charge.period))
            if budget is not None:
                budget.record(router, charge.own)


class SimulatedLimits:
    """The tenants of a fleet, and the owners of their limits, which answer at once."""

    def __init__(self, table: TenantTable, began_at: float) -> None:
        """`began_at`: the seconds since 1970 at the virtual time 0."""
        self._table = table
        self._began_at = began_at
        self._rates, self._budgets = RateOwner(), BudgetOwner()
        self.record = self._budgets.record

    def limiter(self) -> Limiter:
        """The limiter of a router."""
        return Limiter(lambda: self._table, lambda now: self._began_at + now)

    def grant(self, router: str, action: LeasesWanted, num_routers: int, now: float) -> LeasesGranted:
        grants = [
            self._budgets.lease(router, want) if want.name.kind.is_budget else self._rates.lease(router, want, now)
            for want in action.wants
        ]
        return LeasesGranted(grants, num_routers=num_routers)
