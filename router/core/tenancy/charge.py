"""What one request takes from the accounts of its key, its tenant and its organisation: all of it, or nothing."""

from __future__ import annotations

from typing import NamedTuple

from kvloom.tenancy.limits import Limits
from kvloom.tenancy.prices import Price
from router.core.events import Request
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


class Charge:
    """Of one live request that has limits."""

    __slots__ = (
        "accounts",
        "budgets",
        "capped_by",
        "held_until",
        "is_admitted",
        "is_continued",
        "is_exhausted",
        "max_tokens",
        "min_tokens",
        "most_tokens",
        "num_resumed_tokens",
        "price",
        "rates",
        "request",
        "reserved",
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
        resumed = [len(choice.output_token_ids) for choice in request.choices]
        self.num_resumed_tokens = sum(resumed)
        self.is_continued = self.num_resumed_tokens > 0
        """Whether the answer was begun elsewhere, where it has been charged."""
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
        self.is_admitted = False
        self.held_until = 0.0
        self.taken: list[tuple[RateNeed, int]] = []
        self.reserved: list[tuple[BudgetNeed, int]] = []
        self.waiting: list[tuple[RateLease | SlotLease | BudgetLease, int]] = []
        """What is to be leased for it while it is held."""

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
