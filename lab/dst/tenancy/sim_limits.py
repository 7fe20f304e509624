"""Tenants with limits in the simulated world: their table, the owners of their limits, and the faults of both.

All random numbers come from a generator of its own, so that seeds without limits keep their histories.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import msgspec

from kvloom.v1 import control_service_pb2 as pb
from kvloom_common.tenancy.limits import Limits, limits_to_proto
from kvloom_common.tenancy.prices import Price
from kvloom_common.tenancy.table import TenantTable
from lab.dst.tenancy.hostile import SimulatedHostileTenant
from router.core.actions import LeasesWanted, RequestEnded
from router.core.events import Event, LeasesGranted, Request
from router.core.lease_messages import LeaseGrant, LeaseName, LeaseWant
from router.core.tenancy.limiter import Limiter
from tools.simulate.lease_owners import BudgetOwner, RateOwner, SimulatedBudget

NOON: Final = 1_764_072_000.0
PRICE: Final = Price("p", "*", prompt_nanos=2, cached_nanos=1, output_nanos=10, request_nanos=5, batch_percent=50)
FAULTS_PER_SECOND: Final = {
    "redis_away": 1.5,
    "redis_forgets": 0.5,
    "control_away": 1.5,
    "lease_lost": 3.0,
    "lease_late": 2.0,
}
KEYS_PER_TENANT: Final = 2


class VirtualTime(Protocol):
    now: float

    def after(self, seconds: float, callback: Callable[..., None], *args: Any) -> None: ...


class LimitedRouter(Protocol):
    """A router as the owners of limits see it."""

    name: str

    @property
    def now(self) -> float: ...

    def post(self, callback: Callable[..., None], *args: Any) -> None: ...

    def handle(self, event: Event) -> None: ...


class SimLimits:
    def __init__(self, timeline: VirtualTime, seed: int, tenants: Sequence[str], num_routers: int) -> None:
        self._timeline = timeline
        self.rng = random.Random(f"{seed} limits")
        self._num_routers = num_routers
        self.rates, self.budgets = RateOwner(), BudgetOwner()
        self.table = TenantTable()
        self.limits_of: dict[str, Limits] = {}
        """By account."""
        self._is_away = {"redis": False, "control": False}
        self._loses_next = False
        self._delays_next = False
        self.faults: Counter[str] = Counter()
        self.num_faults = 0
        """Those after which rates may be exceeded."""
        self.is_calm = True
        self.hostile = SimulatedHostileTenant(seed, tenants, lambda: NOON + timeline.now)
        self._kind = self.rng.choice(("rates", "budgets", "budgets", "both"))
        self._fill_table(tenants)
        share = self.rng.choice((0.0, 0.5, 1.0))
        self._rates = {kind: rate for kind, rate in FAULTS_PER_SECOND.items() if self.rng.random() < share}

    # -- the world ----------------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        return self._timeline.now

    def start_faults(self) -> None:
        self.is_calm = False
        for kind in self._rates:
            self._schedule(kind)

    def repair(self) -> None:
        self.is_calm = True
        self._is_away = {"redis": False, "control": False}
        self._loses_next = self._delays_next = False

    def limiter(self, node: LimitedRouter) -> Limiter:
        """For the core of a router, whose clock is not that of the world."""
        return Limiter(lambda: self.table, lambda now: NOON + self._timeline.now + (now - node.now))

    def with_key(self, request: Request) -> Request:
        """The request with one of its tenant's keys."""
        return msgspec.structs.replace(request, key_id=f"{request.tenant}.{self.rng.randrange(KEYS_PER_TENANT)}")

    def accounts_of(self, request: Request) -> list[str]:
        return [f"key:{request.key_id}", f"tenant:{request.tenant}", f"org:{request.tenant.partition('/')[0]}"]

    # -- routers ------------------------------------------------------------------------------------------------------

    def ask(self, node: LimitedRouter, action: LeasesWanted) -> None:
        """The router asks Redis and control, each for what it has."""
        for is_budget in (False, True):
            wants = [want for want in action.wants if want.name.kind.is_budget is is_budget]
            if wants:
                self._timeline.after(self.rng.random() * 0.01, self._answer, node, wants, is_budget)

    def record(self, node: LimitedRouter, ended: RequestEnded) -> None:
        """The usage record of a request has arrived at control."""
        self.hostile.note_end(node.name, ended)
        self.budgets.record(node.name, ended)

    def budget(self, name: LeaseName) -> SimulatedBudget | None:
        return self.budgets.budgets.get(name)

    def _answer(self, node: LimitedRouter, wants: Sequence[LeaseWant], is_budget: bool) -> None:
        """The owner decides, unless it cannot be reached. Its answer may be lost, which the router takes for a failure;
        and control may read what it is asked only when the router has given up that connection."""
        answer = LeasesGranted(failed=[want.name for want in wants], num_routers=self._num_routers)
        if is_budget and self._delays_next:
            self._delays_next = False
            self._timeline.after(self.rng.choice((0.05, 1.2, 3.0)), self._decide_late, node.name, wants)
        elif not self._is_away["control" if is_budget else "redis"]:
            lease = self.budgets.lease if is_budget else self._lease_rate
            grants = [lease(node.name, want) for want in wants]
            if not self._loses_next:
                answer = LeasesGranted(grants, num_routers=self._num_routers)
            self._loses_next = False
        self._timeline.after(self.rng.random() * 0.01, node.post, node.handle, answer)

    def _decide_late(self, router: str, wants: Sequence[LeaseWant]) -> None:
        for want in wants:
            self.budgets.lease(router, want)

    def _lease_rate(self, router: str, want: LeaseWant) -> LeaseGrant:
        return self.rates.lease(router, want, self._timeline.now)

    # -- faults -------------------------------------------------------------------------------------------------------

    def _schedule(self, kind: str) -> None:
        self._timeline.after(self.rng.expovariate(self._rates[kind]), self._strike, kind)

    def _strike(self, kind: str) -> None:
        if self.is_calm:
            return
        self.faults[kind] += 1
        match kind:
            case "redis_away" | "control_away":
                who = kind.partition("_")[0]
                self.num_faults += who == "redis"
                self._is_away[who] = True
                self._timeline.after(self.rng.choice((0.05, 0.5, 3.0)), self._come_back, who)
            case "redis_forgets":
                self.num_faults += 1
                self.rates.forget()
            case "lease_late":
                self._delays_next = True
            case _:
                self.num_faults += 1  # the router does not know whether Redis has decided
                self._loses_next = True
        self._schedule(kind)

    def _come_back(self, who: str) -> None:
        self._is_away[who] = False

    # -- the table ----------------------------------------------------------------------------------------------------

    def _fill_table(self, tenants: Sequence[str]) -> None:
        response = pb.FollowResponse(table_id="t", version=1, begins_snapshot=True, is_complete=True, has_prices=True)
        response.prices.append(price_to_proto(PRICE))
        for tenant in tenants:
            organisation = tenant.partition("/")[0]
            response.organisations.add(id=organisation, limits=limits_to_proto(self._draw(f"org:{organisation}")))
            response.tenants.add(id=tenant, limits=limits_to_proto(self._draw(f"tenant:{tenant}")))
            for number in range(KEYS_PER_TENANT):
                name = f"{tenant}.{number}"
                limits = limits_to_proto(self._draw(f"key:{name}"))
                response.keys.add(id=name, digest=name.encode(), tenant=tenant, limits=limits)
        self.table.apply(response)

    def _draw(self, account: str) -> Limits:
        """Small enough that they are reached, and few enough that most requests reach no more than one."""
        rng = self.rng
        has_rates = self._kind != "budgets" and rng.random() < 0.5
        has_budgets = self._kind != "rates" and rng.random() < 0.5
        limits = Limits(
            requests_per_minute=rng.choice((0, 5, 30)) if has_rates else 0,
            tokens_per_minute=rng.choice((0, 300, 1000)) if has_rates else 0,
            tokens_per_day=rng.choice((0, 60, 150, 400)) if has_budgets else 0,
            max_concurrent_requests=rng.choice((0, 1, 4)) if has_rates else 0,
            max_prompt_tokens=rng.choice((0, 0, 0, 30)),
            max_output_tokens=rng.choice((0, 0, 0, 6)),
            monthly_budget_nanos=rng.choice((0, 400, 1000, 4000)) if has_budgets else 0,
            shadow=rng.random() < 0.1,
            cached_token_percent=rng.choice((0, 50, 100)),
        )
        if account == f"tenant:{self.hostile.tenant}" and self.hostile.rng.random() < 0.5:
            limits = msgspec.structs.replace(limits, requests_per_minute=3, shadow=False)
        self.limits_of[account] = limits
        return limits


def price_to_proto(price: Price) -> pb.Price:
    """Returns the price as `control` sends it."""
    return pb.Price(**{field: getattr(price, field) for field in Price.__struct_fields__})
