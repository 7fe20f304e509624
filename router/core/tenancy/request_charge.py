"""What one request takes from the accounts of its key, its tenant and its organisation: all of it, or nothing."""

from __future__ import annotations

import functools
from typing import NamedTuple

from kvloom.tenancy.limits import Limits
from kvloom.tenancy.prices import Price
from kvloom.tenancy.usage_record import Charge, is_part
from kvloom.v1.control_service_pb2 import BUDGET_UNIT_NANOS, BUDGET_UNIT_TOKENS
from router.core.events import Request, Tier
from router.core.lease_messages import LeaseKind
from router.core.tenancy.accounts import Account
from router.core.tenancy.answer_cost import AnswerCost
from router.core.tenancy.budget_lease import BudgetLease
from router.core.tenancy.rate_lease import RateLease
from router.core.tenancy.slot_lease import SlotLease


class RateNeed(NamedTuple):
    lease: RateLease | SlotLease
    units: int
    is_forced: bool
    """It is taken even if there is not enough: the account's limits are only counted, or the answer has been admitted
    elsewhere."""
    limits: Limits

    @property
    def kind(self) -> LeaseKind:
        return self.lease.name.kind


class BudgetNeed(NamedTuple):
    lease: BudgetLease
    cost: AnswerCost
    limits: Limits

    @property
    def kind(self) -> LeaseKind:
        return self.lease.name.kind


class RequestCharge:
    """Of one live request that has limits."""

    __slots__ = (
        "accounts",
        "budgets",
        "capped_by",
        "held_until",
        "is_admitted",
        "is_continued",
        "is_exhausted",
        "is_result_cache_hit",
        "max_tokens",
        "min_tokens",
        "most_tokens",
        "num_resumed_tokens",
        "price",
        "rates",
        "request",
        "reserved",
        "settled",
        "taken",
        "waiting",
    )

    def __init__(self, request: Request, accounts: list[Account], price: Price) -> None:
        self.request = request
        self.accounts = accounts
        self.price = price
        """That at its arrival."""
        self.rates: list[RateNeed] = []
        self.budgets: list[BudgetNeed] = []
        num_given = request.num_earlier_tokens
        self.is_continued = num_given > 0
        """Whether the answer was begun elsewhere, where it has been charged."""
        self.num_resumed_tokens = 0 if is_part(request.answer_id) else num_given
        """Output tokens that the answer already has, as its usage record will count them. They are reserved once more:
        that record will stand for the whole answer, and until then nobody knows what became of the first
        reservation."""
        self.most_tokens = 0
        """Of the whole answer, all choices together."""
        self.min_tokens = 0
        """Fewer are not worth beginning."""
        self.max_tokens: int | None = None
        """How many tokens a choice may have; None: no limit cuts it short."""
        self.capped_by = ""
        """The limit that does."""
        self.is_exhausted = False
        """It may not have one token more than it already has."""
        self.is_result_cache_hit = False
        """Its answer comes from the result cache, and has that price."""
        self.is_admitted = False
        self.held_until = 0.0
        self.taken: list[tuple[RateNeed, int]] = []
        self.reserved: list[tuple[BudgetNeed, int]] = []
        self.settled: tuple[Charge, ...] = ()
        """Once it has ended: what it has used of budgets."""
        self.waiting: list[tuple[RateLease | SlotLease | BudgetLease, int]] = []
        """What is to be leased for it while it is held."""

    def num_output_tokens(self, limit: int) -> int:
        """Of the whole answer, if every choice has so many tokens, or as many as it has already."""
        return self.num_resumed_tokens + sum(
            max(0, limit - len(choice.output_token_ids)) for choice in self.request.choices
        )

    def charges(
        self, num_cached_tokens: int, num_output_tokens: int, num_reasoning_tokens: int, *, has_answer: bool
    ) -> tuple[Charge, ...]:
        """What it uses of budgets if it ends like this; `num_output_tokens` are those of the whole answer, and
        `num_reasoning_tokens` a part of them."""
        if not self.is_admitted:
            return self.settled
        num_prompt_tokens = len(self.request.prompt_token_ids)
        reserved_of = {id(need): reserved for need, reserved in self.reserved}
        found: list[Charge] = []
        for need in self.budgets:
            used, of_prompt, name = 0, 0, need.lease.name
            if has_answer and need.kind is LeaseKind.DAY_TOKENS:
                used = need.limits.weighted_tokens(
                    num_prompt_tokens, num_cached_tokens, num_output_tokens, num_reasoning_tokens
                )
                of_prompt = need.limits.weighted_tokens(num_prompt_tokens, num_cached_tokens, 0, 0)
            elif has_answer:
                is_batch, is_hit = self.request.tier is Tier.BATCH, self.is_result_cache_hit
                cost = functools.partial(self.price.cost_nanos, is_batch=is_batch, is_result_cache_hit=is_hit)
                used = cost(num_prompt_tokens, num_cached_tokens, num_output_tokens)
                of_prompt = cost(num_prompt_tokens, num_cached_tokens, 0)
            unit = BUDGET_UNIT_TOKENS if need.kind is LeaseKind.DAY_TOKENS else BUDGET_UNIT_NANOS
            # In shadow mode an answer may use more than the budget has for it, which is then nobody's lease.
            own = min(used, reserved_of.get(id(need), 0))
            of_prompt = of_prompt if is_part(self.request.answer_id) else 0
            found.append(Charge(name.account, unit, name.period, own, used, of_prompt))
        return tuple(found)

    @property
    def is_held(self) -> bool:
        return not self.is_admitted

    def stop_waiting(self) -> None:
        for lease, units in self.waiting:
            lease.waiting -= units
        self.waiting = []

    def describe(self) -> str:
        """Which limits applied, for explanations."""
        names = [f"{need.lease.name.account} {need.kind.value}" for need in (*self.rates, *self.budgets)]
        text = ", ".join(dict.fromkeys(names))
        return f"{text}; cut short by {self.capped_by}" if self.capped_by else text
