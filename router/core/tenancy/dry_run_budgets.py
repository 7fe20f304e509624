"""Budgets in shadow mode: a request begins without waiting for a lease of one. What the budget would have done to it is
decided when `control` has answered, even if the request has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from router.core.lease_messages import LeaseName
from router.core.tenancy.budget_lease import BudgetLease
from router.core.tenancy.lease_watch import LeaseWatch
from router.core.tenancy.limit_plan import BudgetLimit
from router.core.tenancy.request_charge import RequestCharge

MAX_UNDECIDED: Final = 10_000
"""Requests for which one budget in shadow mode is being asked for. Of further ones nothing is reserved or counted."""


class DryRunBudgets:
    def __init__(self, watch: LeaseWatch, count: Callable[[str, str, str], None]) -> None:
        """`count` gets a limit's kind, what it would have done, and its account."""
        self._watch = watch
        self._count = count
        self._undecided: dict[LeaseName, list[tuple[RequestCharge, BudgetLimit, int]]] = {}
        """Requests with the output tokens that they may have."""

    def add(self, charge: RequestCharge, limit: BudgetLimit, num_tokens: int, now: float) -> None:
        """A request is admitted. It is decided at once, if that can be."""
        lease = limit.lease
        units = charge.cost_of(limit).units(num_tokens)
        if not lease.verdict(units, now).is_wanted:
            self._decide(charge, limit, num_tokens, now)
            return
        undecided = self._undecided.setdefault(lease.name, [])
        if len(undecided) < MAX_UNDECIDED:
            undecided.append((charge, limit, num_tokens))
            lease.waiting += units
            self._watch.touch(lease)

    def decide(self, name: LeaseName, now: float) -> None:
        """`control` has said what there is of a budget, or cannot be asked."""
        if name not in self._undecided:
            return
        for charge, limit, num_tokens in self._undecided.pop(name):
            limit.lease.waiting -= charge.cost_of(limit).units(num_tokens)
            self._decide(charge, limit, num_tokens, now)

    def waiting(self) -> Iterator[tuple[BudgetLease, int]]:
        """Yields what is being asked for."""
        for undecided in self._undecided.values():
            for charge, limit, num_tokens in undecided:
                yield limit.lease, charge.cost_of(limit).units(num_tokens)

    def _decide(self, charge: RequestCharge, limit: BudgetLimit, num_tokens: int, now: float) -> None:
        """Reserve what the budget has for the request, and count what it would have done to it."""
        lease, cost = limit.lease, charge.cost_of(limit)
        affordable = cost.affordable_tokens(lease.free, num_tokens)
        has_enough = affordable is not None and affordable >= min(charge.min_tokens, num_tokens)
        if not has_enough and not charge.is_continued:
            self._count(limit.kind.value, "would_refuse", lease.name.account)
        elif affordable is None or affordable < num_tokens:
            self._count(limit.kind.value, "would_cap", lease.name.account)
        if has_enough and affordable is not None and charge.is_admitted:
            charge.reserved[limit.position] = lease.take(cost.units(affordable), now)
            if lease.is_low:
                self._watch.touch(lease)
