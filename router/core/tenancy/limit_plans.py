"""The plans of the keys in use, kept until the limits of one of their accounts change, a lease is dropped, or a day
ends."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import date
from typing import Final, NamedTuple

from kvloom_common.tenancy.table import Key, Organisation, Tenant, TenantTable
from router.core.tenancy.accounts import AccountTable
from router.core.tenancy.limit_plan import LimitPlan

MAX_PLANS: Final = 8192
"""When there are more, all are forgotten."""
DAY_SECONDS: Final = 86_400
EPOCH_ORDINAL: Final = date(1970, 1, 1).toordinal()


class _Entries(NamedTuple):
    """The entries of the table for a key."""

    key: Key | None
    tenant: Tenant | None
    organisation: Organisation | None


class _Known:
    """A plan, and for how long it holds."""

    __slots__ = ("begins_at", "ends_at", "entries", "plan", "table_state")

    def __init__(self, entries: _Entries, table_state: object) -> None:
        self.entries = entries
        self.table_state = table_state
        self.plan: LimitPlan | None = None
        """None: it has not been made yet."""
        self.begins_at = -math.inf
        """Seconds since 1970."""
        self.ends_at = math.inf


class LimitPlans:
    def __init__(self, book: AccountTable, seconds_since_1970: Callable[[float], float]) -> None:
        """`seconds_since_1970` converts the core's time."""
        self._book = book
        self._seconds_since_1970 = seconds_since_1970
        self._known: dict[tuple[str, str], _Known] = {}

    def of(self, key_id: str, tenant_id: str, table: TenantTable, now: float) -> LimitPlan | None:
        """None: requests with that key have no limits."""
        name = key_id, tenant_id
        known = self._known.get(name)
        if known is None or known.table_state is not table.state:
            known = self._look_up(name, known, table)
        if known.entries is _NO_LIMITS:
            return None
        at = self._seconds_since_1970(now)
        if known.plan is None or not known.begins_at <= at < known.ends_at:
            self._make(known, at)
        return known.plan

    def clear(self) -> None:
        """Accounts or leases were dropped: plans must not use them any more."""
        self._known.clear()

    def _look_up(self, name: tuple[str, str], known: _Known | None, table: TenantTable) -> _Known:
        entries = _entries(*name, table)
        if known is None or any(old is not new for old, new in zip(known.entries, entries, strict=True)):
            if len(self._known) >= MAX_PLANS:
                self._known.clear()
            known = self._known[name] = _Known(entries, table.state)
        known.table_state = table.state
        return known

    def _make(self, known: _Known, at: float) -> None:
        number = int(at // DAY_SECONDS)
        known.begins_at, known.ends_at = number * DAY_SECONDS, (number + 1) * DAY_SECONDS
        day = date.fromordinal(EPOCH_ORDINAL + number).isoformat()
        known.plan = LimitPlan(self._book.of(*known.entries), day)


_NO_LIMITS: Final = _Entries(None, None, None)


def _entries(key_id: str, tenant_id: str, table: TenantTable) -> _Entries:
    """Only those that have limits."""
    key = table.key(key_id)
    tenant = table.tenant(tenant_id)
    organisation = None if tenant is None else table.organisation(tenant.organisation)
    entries = _Entries(
        None if key is None or key.limits.are_none else key,
        None if tenant is None or tenant.limits.are_none else tenant,
        None if organisation is None or organisation.limits.are_none else organisation,
    )
    return _NO_LIMITS if entries == _NO_LIMITS else entries
