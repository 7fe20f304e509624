"""Decides whether a request may begin under its limits, and settles what it has used when it ends.

A request is charged to its key, its tenant and its organisation: to all of them or, if one refuses, to none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from kvloom.errors import KvloomError
from kvloom.limits_state import LimitsState, RateState
from kvloom_common.tenancy.prices import FREE, Price
from kvloom_common.tenancy.table import TenantTable
from router.core.events import JUDGE_TIER, SHADOW_TIER, LeasesGranted, Request, TierRank
from router.core.expected_output import ExpectedOutput
from router.core.lease_messages import LeaseKind, LeaseWant, LimitCount
from router.core.tenancy.accounts import AccountTable, Lease
from router.core.tenancy.dry_run_budgets import DryRunBudgets
from router.core.tenancy.lease_watch import LeaseWatch
from router.core.tenancy.limit_plan import BudgetLimit, LimitPlan
from router.core.tenancy.limit_plans import LimitPlans
from router.core.tenancy.limit_refusals import (
    budget_exhausted,
    budget_unavailable,
    limit_name,
    never_admitted,
    prompt_too_long,
    rate_limited,
)
from router.core.tenancy.rate_lease import RateLease
from router.core.tenancy.request_charge import RateNeed, RequestCharge
from router.core.tenancy.short_path import take_if_leased
from router.core.tenancy.side_calls import SideCalls
from router.core.tenancy.slot_lease import SlotLease

HOLD_SECONDS: Final = 1.0
"""How long a request waits for a lease. Then the router decides with what it has."""
_PROMPT_LIMIT: Final = "max_prompt_tokens"
_OUTPUT_LIMIT: Final = "max_output_tokens"


class Limiter:
    """`table` may be replaced or change at any time; requests are looked up in it as they arrive. `seconds_since_1970`
    converts the core's time: prices and the periods of budgets are those of a request's arrival."""

    def __init__(self, table: Callable[[], TenantTable], seconds_since_1970: Callable[[float], float]) -> None:
        self.table = table
        self._book = AccountTable()
        self._plans = LimitPlans(self._book, seconds_since_1970)
        self._seconds_since_1970 = seconds_since_1970
        self._expected = ExpectedOutput()
        self._watch = LeaseWatch(self._book, self._plans)
        self._undecided = DryRunBudgets(self._watch, self._count)
        self._counts: list[LimitCount] = []
        self._num_routers = 1
        self.side_calls = SideCalls(self._plans, self._watch, self._table, self._count, self._state_of)

    # -- requests -------------------------------------------------------------------------------------------------

    def charge_for(
        self, request: Request, window_of: Callable[[str], int], now: float
    ) -> RequestCharge | KvloomError | None:
        """Returns what the request would take, of which nothing is taken yet; None: it has no limits. `window_of` gives
        the largest window that a request for a model could have."""
        if request.tier is SHADOW_TIER or request.tier is JUDGE_TIER:
            return None
        plan = self._plans.of(request.key_id, request.tenant, self.table(), now)
        if plan is None:
            return None
        self._watch.begin(now)
        charge = RequestCharge(request, plan, self._price(request, plan, now))
        error = self._check_prompt(charge)
        if error is not None:
            return error
        self._limit_output(charge, window_of(request.model))
        if plan.token_leases:
            expected = self._expected.tokens(request.key_id, request.model) * len(request.choices)
            charge.num_expected_tokens = min(expected, charge.most_tokens - charge.num_resumed_tokens)
        if plan.budgets:
            is_batch = request.tier is TierRank.BATCH
            charge.costs = plan.costs(charge.num_prompt_tokens, charge.price, is_batch=is_batch)
        return charge

    def admit(self, charge: RequestCharge, now: float, *, is_last_try: bool = False) -> KvloomError | None:
        """Take what the request needs: `charge.is_admitted` says whether it has it. Otherwise it waits for leases,
        which `take_wants` asks for; or an error is returned. With `is_last_try`, it does not wait any more."""
        if charge.waiting:
            charge.stop_waiting()
        if take_if_leased(charge, self._watch, now):
            return None
        needs = charge.rate_needs()
        refusal, must_wait = self._ask_rates(needs, now, is_last_try=is_last_try)
        num_tokens, scarce, is_unknown = charge.most_tokens, None, False
        for limit in charge.plan.budgets:
            if limit.is_shadow:
                continue
            lease, cost = limit.lease, charge.cost_of(limit)
            verdict = lease.verdict(cost.units(charge.most_tokens), now)
            if verdict.is_ready:
                continue
            if verdict.is_wanted and not is_last_try:
                must_wait = True
                continue
            affordable = cost.affordable_tokens(lease.free, charge.most_tokens)
            if affordable is None or affordable < num_tokens:
                num_tokens, scarce = -1 if affordable is None else affordable, limit
                is_unknown = verdict.is_wanted or lease.is_unreachable(now)
        if refusal is None and scarce is not None and num_tokens < charge.min_tokens and not must_wait:
            if charge.is_continued:
                charge.is_exhausted = True  # it ends with what it has
            else:
                name = scarce.lease.name
                refusal = budget_unavailable(name) if is_unknown else budget_exhausted(name)
        if refusal is not None:
            self._count_refusal(refusal)
            refusal.limits = self.state(charge, now)
            return refusal
        if must_wait:
            self._hold(charge, needs, now)
            return None
        if charge.is_exhausted:
            num_tokens = -1
        self._take(charge, needs, num_tokens, scarce, now)
        return None

    def settle(
        self,
        charge: RequestCharge,
        num_cached_tokens: int,
        num_output_tokens: int,
        num_reasoning_tokens: int,
        *,
        was_dispatched: bool,
        has_answer: bool,
        failed: bool,
    ) -> None:
        """The request has ended; `num_output_tokens` are those of the whole answer, with what was delivered elsewhere.
        Without a lease (it was held until its end) there is nothing to settle."""
        if charge.waiting:
            charge.stop_waiting()
        if not charge.is_admitted:
            return
        is_free = not was_dispatched or (failed and not has_answer)
        charge.settle(
            num_cached_tokens, num_output_tokens, num_reasoning_tokens, has_answer=has_answer, is_free=is_free
        )
        request = charge.request
        if has_answer and request.max_tokens != 0 and not charge.is_continued:
            num_new_tokens = num_output_tokens - charge.num_resumed_tokens
            self._expected.learn(request.key_id, request.model, num_new_tokens / len(request.choices))

    # -- leases ---------------------------------------------------------------------------------------------------

    def on_leases(self, event: LeasesGranted, now: float) -> None:
        """Leases have arrived, or cannot be had."""
        self._num_routers = max(1, event.num_routers)
        for grant in event.grants:
            lease = self._lease(grant.name.account, grant.name)
            if lease is not None:
                lease.on_grant(grant, now)
                self._undecided.decide(grant.name, now)
                self._watch.touch(lease)
        for name in event.failed:
            lease = self._lease(name.account, name)
            if lease is not None:
                lease.on_failure(self._num_routers, now)
                self._undecided.decide(name, now)

    def has_pending_actions(self, now: float) -> bool:
        """True when `take_wants` or `take_counts` may return something: after most events they do not."""
        return bool(self._watch.touched or self._counts) or now >= self._watch.sweep_at

    def take_wants(self, now: float) -> list[LeaseWant]:
        """Returns what is to be asked of the owners of limits after this event."""
        return self._watch.take_wants(now)

    def take_counts(self) -> list[LimitCount]:
        """Returns what limits did since the last call."""
        counts, self._counts = self._counts, []
        return counts

    def next_deadline(self) -> float:
        """The time at which `take_wants` has to be called; infinity: not in the present state."""
        return self._watch.sweep_at

    def state(self, charge: RequestCharge, now: float) -> LimitsState:
        """Returns what the caller is told: the limits that leave least."""
        return self._state_of(charge.plan, now)

    @property
    def num_routers(self) -> int:
        """How many routers shared the limits when that was last known."""
        return self._num_routers

    @property
    def accounts(self) -> AccountTable:
        """Those that are in use."""
        return self._book

    @property
    def num_accounts(self) -> int:
        return len(self._book)

    @property
    def num_local_leases(self) -> int:
        """Rates for which the router's own bucket is in use."""
        return sum(
            isinstance(lease, RateLease) and lease.local_at is not None
            for account in self._book
            for lease in account.leases
        )

    def check_integrity(self, live: Iterable[RequestCharge]) -> None:
        """Assert that leases add up to what the live requests have of them."""
        waiting: dict[int, int] = {}
        in_use: dict[int, int] = {}
        for charge in live:
            assert charge.is_admitted or not (charge.slots or charge.requests or charge.tokens or charge.reserved)
            for lease, units in charge.waiting:
                waiting[id(lease)] = waiting.get(id(lease), 0) + units
            for lease, units in charge.in_use():
                in_use[id(lease)] = in_use.get(id(lease), 0) + units
        for lease, units in (*self._undecided.waiting(), *self.side_calls.waiting()):
            waiting[id(lease)] = waiting.get(id(lease), 0) + units
        for account in self._book:
            for lease in account.leases:
                assert lease.waiting == waiting.get(id(lease), 0)
                if isinstance(lease, SlotLease):
                    assert lease.used == in_use.get(id(lease), 0)
            for lease in account.budgets.values():
                assert lease.free >= 0
                assert lease.reserved == in_use.get(id(lease), 0)

    # -- details --------------------------------------------------------------------------------------------------

    def _table(self) -> TenantTable:
        return self.table()

    def _state_of(self, plan: LimitPlan, now: float) -> LimitsState:
        return LimitsState(_least(plan.shown_requests, now), _least(plan.shown_tokens, now))

    def _price(self, request: Request, plan: LimitPlan, now: float) -> Price:
        if not plan.has_money:
            return FREE
        return self.table().prices.at(request.full_name, self._seconds_since_1970(now))

    def _check_prompt(self, charge: RequestCharge) -> KvloomError | None:
        """Returns the error of a prompt that alone is more than a limit allows; else None."""
        num_tokens, plan = charge.num_prompt_tokens, charge.plan
        for account, limit, is_shadow in plan.max_prompts:
            if num_tokens > limit and not charge.is_continued:
                self._count(_PROMPT_LIMIT, "would_refuse" if is_shadow else "refused", account)
                if not is_shadow:
                    return prompt_too_long(account, limit, num_tokens)
        if num_tokens > plan.min_token_limit:
            for need in charge.rate_needs():
                name, limit = need.limit.lease.name, need.limit.lease.limit
                if name.kind is LeaseKind.TOKENS and num_tokens > limit and not need.is_forced:
                    self._count(name.kind.value, "refused", name.account)
                    return never_admitted(name, limit, num_tokens)
        return None

    def _limit_output(self, charge: RequestCharge, window: int) -> None:
        """How long the answer may be at most, and by which limit."""
        request = charge.request
        room = max(0, window - len(request.prompt_token_ids))
        per_choice = room if request.max_tokens is None else min(request.max_tokens, room)
        for account, limit, is_shadow in charge.plan.max_answers:
            if limit >= per_choice:
                continue
            if is_shadow:
                self._count(_OUTPUT_LIMIT, "would_cap", account)
                continue
            per_choice = charge.max_tokens = limit
            charge.capped_by = f"{account} {_OUTPUT_LIMIT}"
        charge.most_tokens = charge.num_output_tokens(per_choice)
        charge.min_tokens = min(charge.num_resumed_tokens + len(request.choices), charge.most_tokens)

    def _ask_rates(
        self, needs: Sequence[RateNeed], now: float, *, is_last_try: bool
    ) -> tuple[KvloomError | None, bool]:
        """(the refusal with the longest pause, whether a lease has to be waited for)."""
        refusal: KvloomError | None = None
        must_wait = False
        for limit, units, is_forced in needs:
            lease = limit.lease
            verdict = lease.verdict(units, now)
            if verdict.is_wanted and is_last_try:
                lease.on_failure(self._num_routers, now)
                verdict = lease.verdict(units, now)
            if verdict.is_ready or is_forced:
                continue
            if verdict.is_wanted:
                must_wait = True
            elif refusal is None or verdict.retry_after_seconds > refusal.retry_after_seconds:
                refusal = rate_limited(lease.name, lease.limit, verdict.retry_after_seconds)
        return refusal, must_wait

    def _hold(self, charge: RequestCharge, needs: Sequence[RateNeed], now: float) -> None:
        if not charge.held_until:
            charge.held_until = now + HOLD_SECONDS
            self._count("all", "held")
        for need in needs:
            self._wait(charge, need.limit.lease, need.units)
        for limit in charge.plan.budgets:
            self._wait(charge, limit.lease, charge.cost_of(limit).units(charge.most_tokens))

    def _wait(self, charge: RequestCharge, lease: Lease, units: int) -> None:
        lease.waiting += units
        charge.waiting.append((lease, units))
        self._watch.touch(lease)

    def _take(
        self, charge: RequestCharge, needs: Sequence[RateNeed], num_tokens: int, scarce: BudgetLimit | None, now: float
    ) -> None:
        """Everything at once. `num_tokens`: how many output tokens all choices may have."""
        plan = charge.plan
        charge.is_admitted = True
        for account in plan.accounts:
            account.num_charges += 1
        slots: list[SlotLease] = []
        requests: list[RateLease] = []
        charge.slots, charge.requests = slots, requests
        charge.tokens, charge.reserved = [0] * len(plan.token_leases), [0] * len(plan.budgets)
        for limit, units, _ in needs:
            lease = limit.lease
            if limit.is_shadow and lease.is_short(units, now):
                self._count(limit.kind.value, "would_refuse", lease.name.account)
                continue
            if not units:
                continue
            taken = lease.take(units)
            if isinstance(lease, SlotLease):
                slots.append(lease)
            elif limit.kind is LeaseKind.TOKENS:
                charge.tokens[limit.position] = taken
            else:
                requests.append(lease)
            if lease.is_low:
                self._watch.touch(lease)
        if scarce is not None:
            num_tokens = self._cap(charge, max(num_tokens, 0), scarce)
        for limit in plan.budgets:
            if limit.is_shadow:
                self._undecided.add(charge, limit, num_tokens, now)
                continue
            lease, units = limit.lease, charge.cost_of(limit).units(num_tokens)
            if lease.free >= units:
                charge.reserved[limit.position] = lease.take(units, now)
                if lease.is_low:
                    self._watch.touch(lease)

    def _cap(self, charge: RequestCharge, num_tokens: int, scarce: BudgetLimit) -> int:
        """Let every choice have so many more tokens that all have at most `num_tokens`. Returns how many they have then
        at most."""
        choices = charge.request.choices
        num_more = (num_tokens - charge.num_resumed_tokens) // len(choices)
        charge.is_exhausted = num_more < 1
        charge.max_tokens = min(len(choice.output_token_ids) for choice in choices) + max(0, num_more)
        charge.capped_by = limit_name(scarce.lease.name)
        self._count(scarce.kind.value, "capped", scarce.lease.name.account)
        return charge.num_output_tokens(charge.max_tokens)

    def _lease(self, account_name: str, name: object) -> Lease | None:
        account = self._book.get(account_name)
        if account is None:
            return None
        return next((lease for lease in account.leases if lease.name == name), None)

    def _count(self, kind: str, outcome: str, account: str = "") -> None:
        self._counts.append(LimitCount(kind, outcome, account))

    def _count_refusal(self, refusal: KvloomError) -> None:
        account, _, kind = refusal.limit.rpartition(" ")
        self._count(kind, "refused", account)


def _least(leases: Sequence[RateLease], now: float) -> RateState | None:
    """The state of the lease that leaves least."""
    found, least = None, math.inf
    for lease in leases:
        remaining = lease.remaining(now)
        if remaining < least:
            found, least = lease, remaining
    if found is None:
        return None
    return RateState(found.limit, int(least), (found.limit - least) / found.per_second)
