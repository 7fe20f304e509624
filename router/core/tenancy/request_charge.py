"""RequestCharge is what one request takes from the accounts of its key, its tenant and its organisation: all of it, or
nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvloom_common.tenancy.prices import Price
from kvloom_common.tenancy.usage_record import Charge
from router.core.events import Request, TierRank
from router.core.lease_messages import LeaseKind
from router.core.tenancy.accounts import Lease
from router.core.tenancy.answer_cost import AnswerCost
from router.core.tenancy.limit_plan import BudgetLimit, LimitPlan, RateLimit, limit_text
from router.core.tenancy.rate_lease import RateLease
from router.core.tenancy.slot_lease import SlotLease


class RateNeed(NamedTuple):
    limit: RateLimit
    units: int
    is_forced: bool
    """It is taken even if there is not enough: the account's limits are only counted, or the answer has been admitted
    elsewhere."""


class RequestCharge:
    """The charge of one live request that has limits."""

    __slots__ = (
        "budgets",
        "capped_by",
        "costs",
        "held_until",
        "is_admitted",
        "is_continued",
        "is_exhausted",
        "is_result_cache_hit",
        "max_tokens",
        "min_tokens",
        "most_tokens",
        "num_expected_tokens",
        "num_prompt_tokens",
        "num_rated_tokens",
        "num_resumed_tokens",
        "plan",
        "price",
        "request",
        "requests",
        "reserved",
        "settled",
        "slots",
        "tokens",
        "waiting",
    )

    def __init__(self, request: Request, plan: LimitPlan, price: Price) -> None:
        self.request = request
        self.plan = plan
        self.price = price
        """That at its arrival."""
        self.num_prompt_tokens = request.num_prompt_tokens
        self.num_resumed_tokens = request.num_earlier_tokens
        """Output tokens that the answer already has, as its usage record will count them. They are reserved once more:
        that record will stand for the whole answer, and until then nobody knows what became of the first
        reservation."""
        self.is_continued = self.num_resumed_tokens > 0
        """True when the answer was begun elsewhere, where the request and its prompt have been charged."""
        self.num_rated_tokens = self.num_prompt_tokens
        """The tokens that limits per minute count of it, beside new output. A continuation is not refused by them; but
        one of a client outside the fabric counts in full, because how often and where it continues only the client
        says."""
        if self.is_continued:
            self.num_rated_tokens = self.num_prompt_tokens + self.num_resumed_tokens if request.answer_id else 0
        self.num_expected_tokens = 0
        """New output tokens that it takes from limits of tokens until it is known how many there are."""
        self.most_tokens = 0
        """The most tokens of the whole answer, all choices together."""
        self.min_tokens = 0
        """Fewer are not worth beginning."""
        self.max_tokens: int | None = None
        """How many tokens a choice may have; None: no limit cuts it short."""
        self.costs: Sequence[AnswerCost] = ()
        """The cost in units of budgets: see LimitPlan."""
        self.capped_by = ""
        """The limit that does."""
        self.is_exhausted = False
        """It may not have one token more than it already has."""
        self.is_result_cache_hit = False
        """Its answer comes from the result cache, and has that price."""
        self.is_admitted = False
        self.held_until = 0.0
        self.slots: Sequence[SlotLease] = ()
        """The leases of which it has a slot each, once it is admitted."""
        self.requests: Sequence[RateLease] = ()
        """From which it has taken one."""
        self.tokens: list[int] = []
        """The units that it has taken of the plan's limits of tokens."""
        self.reserved: list[int] = []
        """The units that it has reserved of the plan's budgets."""
        self.settled: tuple[Charge, ...] = ()
        """Once it has ended: what it has used of budgets."""
        self.waiting: list[tuple[Lease, int]] = []
        """The units that are to be leased for it while it is held."""

    # -- what it needs --------------------------------------------------------------------------------------------

    def num_output_tokens(self, limit: int) -> int:
        """Returns the tokens of the whole answer, if every choice has so many, or as many as it has already."""
        num_tokens = self.num_resumed_tokens
        for choice in self.request.choices:
            num_tokens += max(0, limit - len(choice.output_token_ids))
        return num_tokens

    def rate_needs(self) -> list[RateNeed]:
        needs: list[RateNeed] = []
        for limit in self.plan.rates:
            units = 1
            if limit.kind is LeaseKind.TOKENS:
                units = self.num_expected_tokens + self.num_rated_tokens
            if self.num_rated_tokens or limit.kind is not LeaseKind.REQUESTS:
                needs.append(RateNeed(limit, units, self.is_continued or limit.is_shadow))
        return needs

    def cost_of(self, limit: BudgetLimit) -> AnswerCost:
        return self.costs[limit.cost]

    # -- what it has ----------------------------------------------------------------------------------------------

    @property
    def is_held(self) -> bool:
        return not self.is_admitted

    def stop_waiting(self) -> None:
        for lease, units in self.waiting:
            lease.waiting -= units
        self.waiting = []

    def in_use(self) -> Iterator[tuple[Lease, int]]:
        """Yields the slots and budgets that it has, with the units of each."""
        for lease in self.slots:
            yield lease, 1
        for limit, reserved in zip(self.plan.budgets, self.reserved, strict=False):
            yield limit.lease, reserved

    def describe(self) -> str:
        """Says which limits applied, for explanations."""
        text = self.plan.description
        if self.is_continued:
            names = (limit_text(one) for one in (*(need.limit for need in self.rate_needs()), *self.plan.budgets))
            text = ", ".join(names)
        return f"{text}; cut short by {self.capped_by}" if self.capped_by else text

    # -- its end --------------------------------------------------------------------------------------------------

    def charges(
        self, num_cached_tokens: int, num_output_tokens: int, num_reasoning_tokens: int, *, has_answer: bool
    ) -> tuple[Charge, ...]:
        """Returns what it uses of budgets if it ends like this; `num_output_tokens` are those of the whole answer, and
        `num_reasoning_tokens` a part of them."""
        if not self.is_admitted:
            return self.settled
        used = self._used(num_cached_tokens, num_output_tokens, num_reasoning_tokens, has_answer=has_answer)
        return self._charges(used)

    def settle(
        self,
        num_cached_tokens: int,
        num_output_tokens: int,
        num_reasoning_tokens: int,
        *,
        has_answer: bool,
        is_free: bool,
    ) -> None:
        """It has ended like this (see `charges`): give back what it has not used. `is_free`: it counts neither as a
        request nor by its tokens."""
        used = self._used(num_cached_tokens, num_output_tokens, num_reasoning_tokens, has_answer=has_answer)
        self.settled = self._charges(used)
        self.is_admitted = False
        for account in self.plan.accounts:
            account.num_charges -= 1
        for lease in self.slots:
            lease.give_back(1)
        if is_free:
            for lease in self.requests:
                lease.give_back(1)
        if self.tokens:
            if is_free or not has_answer or self.is_continued:
                used = self._used_tokens(num_cached_tokens, num_output_tokens, num_reasoning_tokens, is_free=is_free)
            for (lease, weights), taken in zip(self.plan.token_leases, self.tokens, strict=True):
                if taken:
                    lease.give_back(taken - used[weights])
        for (lease, _), reserved, charge in zip(self.plan.budget_leases, self.reserved, self.settled, strict=True):
            lease.settle(reserved, charge.own)

    def _charges(self, used: Sequence[int]) -> tuple[Charge, ...]:
        plan = self.plan
        if not plan.budgets:
            return ()
        found: list[Charge] = []
        budgets = zip(plan.budget_leases, plan.budget_names, self.reserved, strict=True)
        for (_, cost), (account, unit, period), reserved in budgets:
            total = used[cost]
            # In shadow mode an answer may use more than the budget has for it, which is then nobody's lease.
            own = total if total < reserved else reserved
            found.append(Charge(account, unit, period, own, total))
        return tuple(found)

    def _used_tokens(self, num_cached: int, num_output: int, num_reasoning: int, *, is_free: bool) -> list[int]:
        """Returns the tokens that limits per minute count, by the position of weights. An answer that was begun
        elsewhere is charged for what is new, unless its client is outside the fabric."""
        if is_free:
            return [0] * len(self.plan.weights)
        num_prompt = self.num_rated_tokens
        num_cached = min(num_cached, num_prompt)
        num_new = num_output - self.num_resumed_tokens
        num_reasoning = max(0, num_reasoning - self.num_resumed_tokens)  # it usually comes first
        return [one.weighted_tokens(num_prompt, num_cached, num_new, num_reasoning) for one in self.plan.weights]

    def _used(
        self, num_cached_tokens: int, num_output_tokens: int, num_reasoning_tokens: int, *, has_answer: bool
    ) -> list[int]:
        """Units of budgets, by the position of costs."""
        plan = self.plan
        if not has_answer:
            return [0] * (len(plan.weights) + plan.has_money)
        num_prompt = self.num_prompt_tokens
        used = [
            one.weighted_tokens(num_prompt, num_cached_tokens, num_output_tokens, num_reasoning_tokens)
            for one in plan.weights
        ]
        if plan.has_money:
            is_batch, is_hit = self.request.tier is TierRank.BATCH, self.is_result_cache_hit
            used.append(
                self.price.cost_nanos(
                    num_prompt, num_cached_tokens, num_output_tokens, is_batch=is_batch, is_result_cache_hit=is_hit
                )
            )
        return used
