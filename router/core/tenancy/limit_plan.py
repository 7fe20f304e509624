"""The limits of one key, flat: what a request with it is measured against, worked out once for all of its requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from kvloom.v1.control_service_pb2 import BUDGET_UNIT_NANOS, BUDGET_UNIT_TOKENS
from kvloom_common.tenancy.limits import Limits
from kvloom_common.tenancy.prices import Price
from router.core.lease_messages import LeaseKind
from router.core.tenancy.accounts import Account
from router.core.tenancy.answer_cost import AnswerCost, money_cost, token_cost
from router.core.tenancy.budget_lease import BudgetLease
from router.core.tenancy.rate_lease import RateLease
from router.core.tenancy.slot_lease import SlotLease


class LengthLimit(NamedTuple):
    """A limit on the tokens of a prompt, or of an answer."""

    account: str
    max_tokens: int
    is_shadow: bool


class RateLimit(NamedTuple):
    """A limit on requests, tokens or slots."""

    lease: RateLease | SlotLease
    account: Account
    is_shadow: bool
    position: int
    """Among those of its kind."""

    @property
    def kind(self) -> LeaseKind:
        return self.lease.name.kind


class BudgetLimit(NamedTuple):
    lease: BudgetLease
    cost: int
    """The position of its costs: see `LimitPlan.weights`."""
    is_shadow: bool
    position: int
    """Among the budgets."""

    @property
    def kind(self) -> LeaseKind:
        return self.lease.name.kind


class LimitPlan:
    """`accounts` are those of a key that have limits: the key, its tenant, its organisation. The leases are those of
    one day, since budgets are by days and months."""

    __slots__ = (
        "accounts",
        "budget_leases",
        "budget_names",
        "budgets",
        "description",
        "has_money",
        "max_answers",
        "max_prompts",
        "min_token_limit",
        "rates",
        "request_leases",
        "shown_requests",
        "shown_tokens",
        "slot_leases",
        "token_leases",
        "weights",
    )

    def __init__(self, accounts: Sequence[Account], day: str) -> None:
        """`day`: in UTC, e.g. "2026-11-25"."""
        self.accounts = tuple(accounts)
        self.weights = tuple({_weights(account.limits): account.limits for account in accounts}.values())
        """One of the limits that weigh tokens alike. What counts alike has one cost: a request's costs and uses are
        computed for each of these, and for money behind them."""
        self.max_prompts = _length_limits(accounts, "max_prompt_tokens")
        self.max_answers = _length_limits(accounts, "max_output_tokens")
        self.rates: list[RateLimit] = []
        """In the order of the accounts."""
        self.budgets: list[BudgetLimit] = []
        for account in accounts:
            self._add_rates(account)
            self._add_budgets(account, day)
        slots, requests, tokens = (self._of_kind(kind) for kind in _RATES)
        self.slot_leases = tuple(limit.lease for limit in slots if isinstance(limit.lease, SlotLease))
        self.request_leases = tuple(limit.lease for limit in requests if isinstance(limit.lease, RateLease))
        self.token_leases = tuple(
            (limit.lease, self._weight_of(limit.account)) for limit in tokens if isinstance(limit.lease, RateLease)
        )
        """With the positions of their weights."""
        hard_limits = (limit.account.limits.tokens_per_minute for limit in tokens if not limit.is_shadow)
        self.min_token_limit = min(hard_limits, default=math.inf)
        """A longer prompt is more than a minute's tokens of an account."""
        self.budget_leases = tuple((limit.lease, limit.cost) for limit in self.budgets)
        self.budget_names = tuple(map(_budget_name, self.budgets))
        self.has_money = any(limit.kind is LeaseKind.MONTH_NANOS for limit in self.budgets)
        self.shown_requests = _shown(requests)
        """The request limits to report in response headers. Limits in shadow mode are never reported."""
        self.shown_tokens = _shown(tokens)
        self.description = ", ".join(map(limit_text, (*self.rates, *self.budgets)))
        """For explanations."""

    def costs(self, num_prompt_tokens: int, price: Price, *, is_batch: bool) -> list[AnswerCost]:
        """By the position of costs."""
        costs = [token_cost(weights, num_prompt_tokens) for weights in self.weights]
        if self.has_money:
            costs.append(money_cost(price, num_prompt_tokens, is_batch=is_batch))
        return costs

    def _add_rates(self, account: Account) -> None:
        limits = account.limits
        for lease, limit in (
            (account.slots, limits.max_concurrent_requests),
            (account.requests, limits.requests_per_minute),
            (account.tokens, limits.tokens_per_minute),
        ):
            if lease is not None and limit:  # Leases of a limit that is gone stay for a while.
                position = len(self._of_kind(lease.name.kind))
                self.rates.append(RateLimit(lease, account, limits.shadow, position))

    def _add_budgets(self, account: Account, day: str) -> None:
        limits = account.limits
        for kind, limit, period, cost in (
            (LeaseKind.DAY_TOKENS, limits.tokens_per_day, day, self._weight_of(account)),
            (LeaseKind.MONTH_NANOS, limits.monthly_budget_nanos, day[:7], len(self.weights)),
        ):
            if limit:
                lease = account.budget(kind, limit, period)
                self.budgets.append(BudgetLimit(lease, cost, limits.shadow, len(self.budgets)))

    def _of_kind(self, kind: LeaseKind) -> list[RateLimit]:
        return [limit for limit in self.rates if limit.kind is kind]

    def _weight_of(self, account: Account) -> int:
        return [_weights(one) for one in self.weights].index(_weights(account.limits))


_RATES = LeaseKind.SLOTS, LeaseKind.REQUESTS, LeaseKind.TOKENS


def limit_text(limit: RateLimit | BudgetLimit) -> str:
    return f"{limit.lease.name.account} {limit.kind.value}"


def _budget_name(limit: BudgetLimit) -> tuple[str, int, str]:
    """Returns the budget's name in usage records: the account, the unit and the period."""
    unit = BUDGET_UNIT_TOKENS if limit.kind is LeaseKind.DAY_TOKENS else BUDGET_UNIT_NANOS
    return limit.lease.name.account, unit, limit.lease.name.period


def _weights(limits: Limits) -> tuple[int, int]:
    return limits.cached_token_percent, limits.reasoning_token_percent


def _length_limits(accounts: Sequence[Account], field: str) -> tuple[LengthLimit, ...]:
    return tuple(
        LengthLimit(account.name, limit, account.limits.shadow)
        for account in accounts
        if (limit := getattr(account.limits, field))
    )


def _shown(limits: Sequence[RateLimit]) -> tuple[RateLease, ...]:
    return tuple(limit.lease for limit in limits if isinstance(limit.lease, RateLease) and not limit.is_shadow)
