"""Sends what the core wants to the owner of each limit, and counts what limits do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final

import structlog
from prometheus_client import REGISTRY, CollectorRegistry

from kvloom_common.config import KvloomConfig
from kvloom_common.trust.fabric_trust import FabricTrust
from router import metric_table as table
from router.core.actions import LeasesWanted, LimitsCounted
from router.core.events import LeasesGranted
from router.core.lease_messages import LimitCount
from router.core.tenancy.limiter import Limiter
from router.tenancy.budget_leases import BudgetLeases
from router.tenancy.rate_leases import RateLeases

log = structlog.get_logger()


def epoch_clock() -> Callable[[float], float]:
    """Converts the event loop's time to seconds since 1970. A step of the system's clock is noticed, so that a budget
    begins when its day does."""
    loop = asyncio.get_running_loop()

    def convert(now: float) -> float:
        return time.time() - loop.time() + now

    return convert


class LeaseClient:
    def __init__(
        self,
        config: KvloomConfig,
        limiter: Limiter,
        producer: str,
        control_candidates: Callable[[], Sequence[str]],
        trust: FabricTrust,
        on_answer: Callable[[LeasesGranted], None],
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        """`producer`: the router and its incarnation."""
        self._rates = RateLeases(config.redis.url, config.redis.key_prefix, producer, on_answer)
        self._budgets = BudgetLeases(producer, control_candidates, trust, on_answer)
        self._counter = table.LIMIT_DECISIONS.family(registry)
        self._shadow_log = ShadowLog()
        table.LIMIT_ACCOUNTS.watch(registry, lambda: limiter.num_accounts)
        table.LIMIT_LOCAL_LEASES.watch(registry, lambda: limiter.num_local_leases)
        table.LIMIT_REDIS_UP.watch(registry, lambda: float(self._rates.is_up))
        table.LIMIT_CONTROL_UP.watch(registry, lambda: float(self._budgets.is_up))

    async def run(self) -> None:
        """Runs until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._rates.run(), name="rate leases")
            tasks.create_task(self._budgets.run(), name="budget leases")

    def leases_wanted(self, action: LeasesWanted) -> None:
        budgets = [want for want in action.wants if want.name.kind.is_budget]
        rates = [want for want in action.wants if not want.name.kind.is_budget]
        if budgets:
            self._budgets.ask(budgets)
        if rates:
            self._rates.ask(rates)

    def limits_counted(self, action: LimitsCounted) -> None:
        for count in action.counts:
            self._counter.labels(count.kind, count.outcome).inc()
            if count.outcome in SHADOW_OUTCOMES:
                self._shadow_log.note(count)


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
