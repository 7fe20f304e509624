"""The keys, tenants and organisations whose limits are in use, with this router's leases of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from kvloom_common.tenancy.limits import Limits
from kvloom_common.tenancy.table import Key, Organisation, Tenant
from router.core.lease_messages import LeaseKind, LeaseName
from router.core.tenancy.budget_lease import BudgetLease
from router.core.tenancy.rate_lease import RateLease
from router.core.tenancy.slot_lease import SlotLease

Lease = RateLease | SlotLease | BudgetLease


class Account:
    """One key, tenant or organisation that has limits."""

    __slots__ = (
        "_want_numbers",
        "budgets",
        "limits",
        "name",
        "num_charges",
        "requests",
        "slots",
        "tokens",
    )

    def __init__(self, name: str, limits: Limits, want_numbers: Iterator[int]) -> None:
        """`want_numbers`: see BudgetLease."""
        self.name = name
        self._want_numbers = want_numbers
        self.limits = limits
        self.requests: RateLease | None = None
        self.tokens: RateLease | None = None
        self.slots: SlotLease | None = None
        self.budgets: dict[LeaseName, BudgetLease] = {}
        self.num_charges = 0
        """The number of charges of live requests that were admitted."""
        self._set_leases()

    def set_limits(self, limits: Limits) -> None:
        """They may have changed. What has been leased stays leased."""
        if limits is not self.limits:
            self.limits = limits
            self._set_leases()

    def budget(self, kind: LeaseKind, limit: int, period: str) -> BudgetLease:
        name = LeaseName(self.name, kind, period)
        lease = self.budgets.get(name)
        if lease is None:
            lease = self.budgets[name] = BudgetLease(name, limit, self._want_numbers)
        lease.set_limit(limit)
        return lease

    @property
    def leases(self) -> Iterator[Lease]:
        for lease in (self.requests, self.tokens, self.slots):
            if lease is not None:
                yield lease
        yield from self.budgets.values()

    def drop_idle_budgets(self, now: float) -> bool:
        """Forget budgets that are not in use. Returns whether there were any."""
        idle = [name for name, lease in self.budgets.items() if lease.is_idle(now)]
        for name in idle:
            del self.budgets[name]
        return bool(idle)

    def is_idle(self, now: float) -> bool:
        """True when it need not be remembered."""
        return not self.num_charges and all(lease.is_idle(now) for lease in self.leases)

    def _set_leases(self) -> None:
        """Leases of a limit that is gone stay until they are idle, since requests may have units of them."""
        limits = self.limits
        if limits.requests_per_minute:
            self.requests = self._rate(self.requests, LeaseKind.REQUESTS, limits.requests_per_minute)
        if limits.tokens_per_minute:
            self.tokens = self._rate(self.tokens, LeaseKind.TOKENS, limits.tokens_per_minute)
        if limits.max_concurrent_requests:
            self.slots = self.slots or SlotLease(LeaseName(self.name, LeaseKind.SLOTS), limits.max_concurrent_requests)
            self.slots.set_limit(limits.max_concurrent_requests)

    def _rate(self, lease: RateLease | None, kind: LeaseKind, limit: int) -> RateLease:
        lease = lease or RateLease(LeaseName(self.name, kind), limit)
        lease.set_limit(limit)
        return lease


class AccountTable:
    """The accounts that are in use, by name."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self._want_numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._accounts)

    def __iter__(self) -> Iterator[Account]:
        return iter(list(self._accounts.values()))

    def get(self, name: str) -> Account | None:
        return self._accounts.get(name)

    def of(self, key: Key | None, tenant: Tenant | None, organisation: Organisation | None) -> list[Account]:
        """Returns the accounts of those entries of the table that have limits. A key shares the account of the one that
        it has replaced."""
        entries = (
            ("key", "" if key is None else key.account or key.id, key),
            ("tenant", "" if tenant is None else tenant.id, tenant),
            ("org", "" if organisation is None else organisation.id, organisation),
        )
        return [self._account(f"{kind}:{name}", entry.limits) for kind, name, entry in entries if entry is not None]

    def drop(self, account: Account) -> None:
        del self._accounts[account.name]

    def _account(self, name: str, limits: Limits) -> Account:
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = Account(name, limits, self._want_numbers)
        else:
            account.set_limits(limits)
        return account
