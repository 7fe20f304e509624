"""The usual case at admission: this router has leased everything that the request needs."""

from __future__ import annotations

from router.core.tenancy.lease_watch import LeaseWatch
from router.core.tenancy.request_charge import RequestCharge


def take_if_leased(charge: RequestCharge, watch: LeaseWatch, now: float) -> bool:
    """Take all that the request needs if it is all there, and else nothing. It is the same as if each limit had been
    asked for its verdict, and all had been ready."""
    plan = charge.plan
    if charge.is_continued:
        return False
    num_tokens = charge.num_prompt_tokens + charge.num_expected_tokens
    units = [cost.units(charge.most_tokens) for cost in charge.costs]
    for slots in plan.slot_leases:
        if not slots.has_one:
            return False
    for requests in plan.request_leases:
        if not requests.has(1, now):
            return False
    for tokens, _ in plan.token_leases:
        if not tokens.has(num_tokens, now):
            return False
    for budget, cost in plan.budget_leases:
        if budget.free < units[cost]:
            return False

    charge.is_admitted = True
    for account in plan.accounts:
        account.num_charges += 1
    charge.slots, charge.requests = plan.slot_leases, plan.request_leases
    for slots in plan.slot_leases:
        slots.take(1)
        if slots.is_low:
            watch.touch(slots)
    for requests in plan.request_leases:
        if requests.take_leased(1):
            watch.touch(requests)
    charge.tokens = [num_tokens] * len(plan.token_leases)
    for tokens, _ in plan.token_leases:
        if tokens.take_leased(num_tokens):
            watch.touch(tokens)
    for budget, cost in plan.budget_leases:
        charge.reserved.append(budget.take(units[cost], now))
        if budget.is_low:
            watch.touch(budget)
    return True
