"""Whom a record is charged to, and what it adds to which sums. Pure."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from kvloom.v1.control_service_pb2 import BUDGET_UNIT_NANOS, BUDGET_UNIT_TOKENS
from kvloom_common.tenancy.usage_record import UsageRecord


class Budget(NamedTuple):
    """See BudgetName in control_service.proto."""

    account: str
    unit: int
    period: str


class DayKey(NamedTuple):
    """A row of usage_daily."""

    day: str
    tenant: str
    key_id: str
    model: str
    tier: str
    priority_class: str


SUMS = (
    "num_requests",
    "num_prompt_tokens",
    "num_cached_tokens",
    "num_output_tokens",
    "num_reasoning_tokens",
    "block_milliseconds",
    "cost_nanos",
)
"""The sums of such a row."""


def day_of(seconds_since_1970: float) -> str:
    return datetime.datetime.fromtimestamp(seconds_since_1970, datetime.UTC).date().isoformat()


def accounts_of(tenant: str, key_id: str) -> list[str]:
    """All accounts of a request, by their names. `key_id`: the key that the account is called after (key_accounts)."""
    found = [f"tenant:{tenant}", f"org:{tenant.partition('/')[0]}"] if tenant else []
    return [f"key:{key_id}", *found] if key_id else found


def spending_of(record: UsageRecord, key_accounts: Mapping[str, str]) -> Iterator[tuple[Budget, int]]:
    """Yields what an answer adds to each of its accounts: the router's charge, where there is a hard budget.
    `key_accounts`: the keys whose accounts are called after another key, with that key."""
    if not record.is_billed:
        return
    charged = {(charge.account, charge.unit): charge for charge in record.charges}
    day = day_of(record.ended_at)
    tokens = record.num_prompt_tokens + record.num_output_tokens
    for account in accounts_of(record.tenant, key_accounts.get(record.key_id, record.key_id)):
        for unit, period, amount in (
            (BUDGET_UNIT_NANOS, day[:7], record.cost_nanos),
            (BUDGET_UNIT_TOKENS, day, tokens),
        ):
            charge = charged.get((account, unit))
            if charge is None:
                yield Budget(account, unit, period), amount
            else:
                yield Budget(account, unit, charge.period), charge.total


def day_key_of(record: UsageRecord) -> DayKey:
    day = day_of(record.ended_at)
    return DayKey(day, record.tenant, record.key_id, record.priced_model, record.tier, record.served_class)


def sums_of(record: UsageRecord) -> tuple[int, ...]:
    """In the order of SUMS."""
    return (
        1,
        record.num_prompt_tokens,
        record.num_cached_tokens,
        record.num_output_tokens,
        record.num_reasoning_tokens,
        round(record.block_seconds * 1e3),
        record.cost_nanos,
    )


class Deltas:
    """Sums up what a batch of records changes."""

    def __init__(self, key_accounts: Mapping[str, str] | None = None) -> None:
        """`key_accounts`: see spending_of."""
        self._key_accounts = key_accounts or {}
        self.days: dict[DayKey, list[int]] = {}
        self.spending: Counter[Budget] = Counter()
        self.settled: Counter[tuple[Budget, str]] = Counter()
        """(budget, producer) → what is no longer leased."""

    def replace(self, old: Iterable[UsageRecord], new: Iterable[UsageRecord]) -> None:
        """Other records count for an answer. `old`: those that did; none: the answer is new."""
        for record in old:
            self._add(record, -1)
        for record in new:
            self._add(record, 1)

    def settle(self, record: UsageRecord) -> None:
        """A record has arrived: its router's lease is less by what it has taken from it."""
        for charge in record.charges:
            self.settled[Budget(charge.account, charge.unit, charge.period), record.producer] += charge.own

    def _add(self, record: UsageRecord, sign: int) -> None:
        sums = self.days.setdefault(day_key_of(record), [0] * len(SUMS))
        for position, value in enumerate(sums_of(record)):
            sums[position] += sign * value
        for budget, amount in spending_of(record, self._key_accounts):
            self.spending[budget] += sign * amount
