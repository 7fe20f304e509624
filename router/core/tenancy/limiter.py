"""Decides whether a request may begin under its limits, and settles what it has used when it ends.

A request is charged to its key, its tenant and its organisation: to all of them or, if one refuses, to none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from datetime import date
from typing import Final

from kvloom.errors import KvloomError
from kvloom.tenancy.limits_state import LimitsState, RateState
from kvloom.tenancy.table import TenantTable
from router.core.events import SHADOW_TIER, LeasesGranted, Request, Tier
from router.core.lease_messages import LeaseKind, LeaseName, LeaseWant, LimitCount
from router.core.tenancy.accounts import Account, AccountBook, Lease
from router.core.tenancy.answer_cost import money_cost, token_cost
from router.core.tenancy.expected_output import ExpectedOutput
from router.core.tenancy.limit_refusals import (
    budget_exhausted,
    budget_unavailable,
    limit_name,
    never_admitted,
    prompt_too_long,
    rate_limited,
)
from router.core.tenancy.rate_lease import RateLease
from router.core.tenancy.request_charge import BudgetNeed, RateNeed, RequestCharge
from router.core.tenancy.slot_lease import SlotLease

HOLD_SECONDS: Final = 1.0
"""How long a request waits for a lease. Then the router decides with what it has."""
SWEEP_SECONDS: Final = 0.5
"""How often unused leases are given back, and those in use are renewed."""
EPOCH_ORDINAL: Final = date(1970, 1, 1).toordinal()
MAX_UNDECIDED: Final = 10_000
"""Requests for which one budget in shadow mode is being asked for. Of further ones nothing is reserved or counted."""
_PROMPT_LIMIT: Final = "max_prompt_tokens"
_OUTPUT_LIMIT: Final = "max_output_tokens"


class Limiter:
    """`table` may be replaced or change at any time; requests are looked up in it as they arrive. `seconds_since_1970`
    converts the core's time: prices and the periods of budgets are those of a request's arrival."""

    def __init__(self, table: Callable[[], TenantTable], seconds_since_1970: Callable[[float], float]) -> None:
        self.table = table
        self._book = AccountBook()
        self._seconds_since_1970 = seconds_since_1970
        self._expected = ExpectedOutput()
        self._touched: dict[int, Lease] = {}
        """Leases that may have to be asked for after this event."""
        self._sweep_at = math.inf
        self._counts: list[LimitCount] = []
        self._undecided: dict[LeaseName, list[tuple[RequestCharge, BudgetNeed, int]]] = {}
        """Requests that were admitted before it was known what a budget in shadow mode has for them, with the output
        tokens that they may have. They are decided when `control` has answered, even if they have ended."""
        self._num_routers = 1
        self._day = (-1, "")
        """The last day that was asked for: its number since 1970, and its name."""

    # -- requests -------------------------------------------------------------------------------------------------

    def charge_for(self, request: Request, window: int, now: float) -> RequestCharge | KvloomError | None:
        """What the request would take, of which nothing is taken yet; None: it has no limits. `window` is the largest
        one that it could have."""
        if request.tier is SHADOW_TIER:
            return None
        accounts = self._book.of(request, self.table())
        if not accounts:
            return None
        price = self.table().prices.at(_priced_model(request), self._seconds_since_1970(now))
        charge = RequestCharge(request, accounts, price)
        num_prompt_tokens = len(request.prompt_token_ids)
        for account in accounts:
            limit = account.limits.max_prompt_tokens
            if limit and num_prompt_tokens > limit and not charge.is_continued:
                self._count(_PROMPT_LIMIT, "would_refuse" if account.limits.shadow else "refused", account.name)
                if not account.limits.shadow:
                    return prompt_too_long(account.name, limit, num_prompt_tokens)
        self._limit_output(charge, window)
        for account in accounts:
            error = self._add_needs(charge, account, now)
            if error is not None:
                return error
        if self._sweep_at == math.inf:
            self._sweep_at = now + SWEEP_SECONDS
        return charge

    def admit(self, charge: RequestCharge, now: float, *, is_last_try: bool = False) -> KvloomError | None:
        """Take what the request needs: `charge.is_admitted` says whether it has it. Otherwise it waits for leases,
        which `take_wants` asks for; or an error is returned. With `is_last_try`, it does not wait any more."""
        charge.stop_waiting()
        refusal: KvloomError | None = None
        must_wait = False
        for need in charge.rates:
            verdict = need.lease.verdict(need.units, now)
            if verdict.is_wanted and is_last_try:
                need.lease.on_failure(self._num_routers, now)
                verdict = need.lease.verdict(need.units, now)
            if verdict.is_ready or need.is_forced:
                continue
            if verdict.is_wanted:
                must_wait = True
            elif refusal is None or verdict.retry_after_seconds > refusal.retry_after_seconds:
                refusal = rate_limited(need.lease.name, need.lease.limit, verdict.retry_after_seconds)
        num_tokens, scarce, is_unknown = charge.most_tokens, None, False
        for need in charge.budgets:
            if need.limits.shadow:
                continue
            verdict = need.lease.verdict(need.cost.units(charge.most_tokens), now)
            if verdict.is_ready:
                continue
            if verdict.is_wanted and not is_last_try:
                must_wait = True
                continue
            affordable = need.cost.affordable_tokens(need.lease.free, charge.most_tokens)
            if affordable is None or affordable < num_tokens:
                num_tokens, scarce = -1 if affordable is None else affordable, need
                is_unknown = verdict.is_wanted or need.lease.is_unreachable(now)
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
            self._hold(charge, now)
            return None
        if charge.is_exhausted:
            num_tokens = -1
        self._take(charge, num_tokens, scarce, now)
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
        charge.stop_waiting()
        if not charge.is_admitted:
            return
        charge.settled = charge.charges(
            num_cached_tokens, num_output_tokens, num_reasoning_tokens, has_answer=has_answer
        )
        charge.is_admitted = False
        for account in charge.accounts:
            account.num_charges -= 1
        request = charge.request
        is_free = not was_dispatched or (failed and not has_answer)
        num_new_tokens = num_output_tokens - charge.num_resumed_tokens
        for need, taken in charge.taken:
            if need.kind is LeaseKind.SLOTS or is_free:
                need.lease.give_back(taken)
            elif need.kind is LeaseKind.TOKENS:
                num_prompt = 0 if charge.is_continued else len(request.prompt_token_ids)
                num_cached = min(num_cached_tokens, num_prompt)
                num_reasoning = max(0, num_reasoning_tokens - charge.num_resumed_tokens)  # it usually comes first
                used = need.limits.weighted_tokens(num_prompt, num_cached, num_new_tokens, num_reasoning)
                need.lease.give_back(taken - used)
        used_of = {(used.account, used.period): used.own for used in charge.settled}
        for need, reserved in charge.reserved:
            need.lease.settle(reserved, used_of[need.lease.name.account, need.lease.name.period])
        if has_answer and request.max_tokens != 0 and not charge.is_continued:
            self._expected.learn(request.key_id, request.model, num_new_tokens / len(request.choices))

    # -- leases ---------------------------------------------------------------------------------------------------

    def on_leases(self, event: LeasesGranted, now: float) -> None:
        """Leases have arrived, or cannot be had."""
        self._num_routers = max(1, event.num_routers)
        for grant in event.grants:
            lease = self._lease(grant.name.account, grant.name)
            if lease is not None:
                lease.on_grant(grant, now)
                self._decide_waiting(grant.name, now)
                self._touch(lease)
        for name in event.failed:
            lease = self._lease(name.account, name)
            if lease is not None:
                lease.on_failure(self._num_routers, now)
                self._decide_waiting(name, now)

    def take_wants(self, now: float) -> list[LeaseWant]:
        """What is to be asked of the owners of limits after this event."""
        if now >= self._sweep_at:
            self._sweep(now)
        if not self._touched:
            return []
        touched, self._touched = self._touched, {}
        return [want for lease in touched.values() if (want := lease.want(now)) is not None]

    def take_counts(self) -> list[LimitCount]:
        """What limits did since the last call."""
        counts, self._counts = self._counts, []
        return counts

    def next_deadline(self) -> float:
        """The time at which `take_wants` has to be called; infinity: not in the present state."""
        return self._sweep_at

    def state(self, charge: RequestCharge, now: float) -> LimitsState:
        """What the caller is told: the limits that leave least."""
        accounts = [account for account in charge.accounts if not account.limits.shadow]
        return LimitsState(
            _least([account.requests for account in accounts], now),
            _least([account.tokens for account in accounts], now),
        )

    @property
    def accounts(self) -> AccountBook:
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
            assert charge.is_admitted or not (charge.taken or charge.reserved)
            for lease, units in charge.waiting:
                waiting[id(lease)] = waiting.get(id(lease), 0) + units
            for need, units in (*charge.taken, *charge.reserved):
                in_use[id(need.lease)] = in_use.get(id(need.lease), 0) + units
        for undecided in self._undecided.values():
            for _, need, num_tokens in undecided:
                waiting[id(need.lease)] = waiting.get(id(need.lease), 0) + need.cost.units(num_tokens)
        for account in self._book:
            for lease in account.leases:
                assert lease.waiting == waiting.get(id(lease), 0)
                if isinstance(lease, SlotLease):
                    assert lease.used == in_use.get(id(lease), 0)
            for lease in account.budgets.values():
                assert lease.free >= 0
                assert lease.reserved == in_use.get(id(lease), 0)

    # -- details --------------------------------------------------------------------------------------------------

    def _limit_output(self, charge: RequestCharge, window: int) -> None:
        """How long the answer may be at most, and by which limit."""
        request = charge.request
        num_choices = len(request.choices)
        room = max(0, window - len(request.prompt_token_ids))
        per_choice = room if request.max_tokens is None else min(request.max_tokens, room)
        for account in charge.accounts:
            limit = account.limits.max_output_tokens
            if not limit or limit >= per_choice:
                continue
            if account.limits.shadow:
                self._count(_OUTPUT_LIMIT, "would_cap", account.name)
                continue
            per_choice = charge.max_tokens = limit
            charge.capped_by = f"{account.name} {_OUTPUT_LIMIT}"
        charge.most_tokens = charge.num_output_tokens(per_choice)
        charge.min_tokens = min(charge.num_resumed_tokens + num_choices, charge.most_tokens)

    def _add_needs(self, charge: RequestCharge, account: Account, now: float) -> KvloomError | None:
        request, limits = charge.request, account.limits
        is_continued = charge.is_continued and account.may_continue(now)
        is_forced = limits.shadow or is_continued
        if account.slots is not None and limits.max_concurrent_requests:
            charge.rates.append(RateNeed(account.slots, 1, is_forced, limits))
        if account.requests is not None and limits.requests_per_minute and not is_continued:
            charge.rates.append(RateNeed(account.requests, 1, is_forced, limits))
        num_prompt_tokens = len(request.prompt_token_ids)
        if account.tokens is not None and limits.tokens_per_minute:
            num_prompt = 0 if is_continued else num_prompt_tokens
            if num_prompt > limits.tokens_per_minute and not is_forced:
                self._count(LeaseKind.TOKENS.value, "refused", account.name)
                return never_admitted(account.tokens.name, limits.tokens_per_minute, num_prompt)
            expected = self._expected.tokens(request.key_id, request.model) * len(request.choices)
            num_output = min(expected, charge.most_tokens - charge.num_resumed_tokens)
            units = limits.weighted_tokens(num_prompt, 0, num_output, 0)
            charge.rates.append(RateNeed(account.tokens, units, is_forced, limits))
        if limits.tokens_per_day:
            lease = account.budget(LeaseKind.DAY_TOKENS, limits.tokens_per_day, self._today(now))
            charge.budgets.append(BudgetNeed(lease, token_cost(limits, num_prompt_tokens), limits))
        if limits.monthly_budget_nanos:
            lease = account.budget(LeaseKind.MONTH_NANOS, limits.monthly_budget_nanos, self._today(now)[:7])
            is_batch = request.tier is Tier.BATCH
            cost = money_cost(charge.price, num_prompt_tokens, is_batch=is_batch)
            charge.budgets.append(BudgetNeed(lease, cost, limits))
        return None

    def _today(self, now: float) -> str:
        """The day in UTC, e.g. "2026-11-25"."""
        number = int(self._seconds_since_1970(now) // 86_400)
        if number != self._day[0]:
            self._day = number, date.fromordinal(EPOCH_ORDINAL + number).isoformat()
        return self._day[1]

    def _hold(self, charge: RequestCharge, now: float) -> None:
        if not charge.held_until:
            charge.held_until = now + HOLD_SECONDS
            self._count("all", "held")
        for need in charge.rates:
            self._wait(charge, need.lease, need.units)
        for need in charge.budgets:
            self._wait(charge, need.lease, need.cost.units(charge.most_tokens))

    def _wait(self, charge: RequestCharge, lease: Lease, units: int) -> None:
        lease.waiting += units
        charge.waiting.append((lease, units))
        self._touch(lease)

    def _take(self, charge: RequestCharge, num_tokens: int, scarce: BudgetNeed | None, now: float) -> None:
        """Everything at once. `num_tokens`: how many output tokens all choices may have."""
        charge.is_admitted = True
        for account in charge.accounts:
            account.num_charges += 1
        for need in charge.rates:
            if need.limits.shadow and need.lease.is_short(need.units, now):
                self._count(need.kind.value, "would_refuse", need.lease.name.account)
            elif need.units:
                charge.taken.append((need, need.lease.take(need.units)))
                if need.lease.is_low:
                    self._touch(need.lease)
        if scarce is not None:
            num_tokens = self._cap(charge, max(num_tokens, 0), scarce)
        for need in charge.budgets:
            units = need.cost.units(num_tokens)
            if need.limits.shadow:
                self._try_budget(charge, need, num_tokens, now)
            elif need.lease.free >= units:
                self._reserve(charge, need, units, now)

    def _reserve(self, charge: RequestCharge, need: BudgetNeed, units: int, now: float) -> None:
        charge.reserved.append((need, need.lease.take(units, now)))
        if need.lease.is_low:
            self._touch(need.lease)

    def _try_budget(self, charge: RequestCharge, need: BudgetNeed, num_tokens: int, now: float) -> None:
        """A request with a budget in shadow mode begins without waiting for a lease of it."""
        units = need.cost.units(num_tokens)
        if not need.lease.verdict(units, now).is_wanted:
            self._decide(charge, need, num_tokens, now)
            return
        undecided = self._undecided.setdefault(need.lease.name, [])
        if len(undecided) < MAX_UNDECIDED:
            undecided.append((charge, need, num_tokens))
            need.lease.waiting += units
            self._touch(need.lease)

    def _decide_waiting(self, name: LeaseName, now: float) -> None:
        """`control` has said what there is of a budget, or cannot be asked."""
        for charge, need, num_tokens in self._undecided.pop(name, ()):
            need.lease.waiting -= need.cost.units(num_tokens)
            self._decide(charge, need, num_tokens, now)

    def _decide(self, charge: RequestCharge, need: BudgetNeed, num_tokens: int, now: float) -> None:
        """Reserve what a budget in shadow mode has for a request, and count what it would have done to it."""
        affordable = need.cost.affordable_tokens(need.lease.free, num_tokens)
        has_enough = affordable is not None and affordable >= min(charge.min_tokens, num_tokens)
        if not has_enough and not charge.is_continued:
            self._count(need.kind.value, "would_refuse", need.lease.name.account)
        elif affordable is None or affordable < num_tokens:
            self._count(need.kind.value, "would_cap", need.lease.name.account)
        if has_enough and affordable is not None and charge.is_admitted:
            self._reserve(charge, need, need.cost.units(affordable), now)

    def _cap(self, charge: RequestCharge, num_tokens: int, scarce: BudgetNeed) -> int:
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

    def _sweep(self, now: float) -> None:
        self._sweep_at = math.inf
        for account in self._book:
            if account.drop_idle(now):
                self._book.drop(account)
                continue
            self._sweep_at = now + SWEEP_SECONDS
            for lease in account.leases:
                self._touch(lease)

    def _touch(self, lease: Lease) -> None:
        self._touched[id(lease)] = lease

    def _count(self, kind: str, outcome: str, account: str = "") -> None:
        self._counts.append(LimitCount(kind, outcome, account))

    def _count_refusal(self, refusal: KvloomError) -> None:
        account, _, kind = refusal.limit.rpartition(" ")
        self._count(kind, "refused", account)


def _priced_model(request: Request) -> str:
    adapter = request.adapter
    return request.model if adapter is None else f"{request.model}:{adapter.name}"


def _least(leases: Iterable[RateLease | None], now: float) -> RateState | None:
    """The state of the lease that leaves least."""
    found, least = None, math.inf
    for lease in leases:
        if lease is not None and (remaining := lease.remaining(now)) < least:
            found, least = lease, remaining
    return None if found is None else RateState(found.limit, int(least), found.reset_seconds(now))
