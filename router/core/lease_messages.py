"""Defines what the core asks of the owners of shared limits and what they answer, and what limits did to requests.
Redis has the rates and the slots, `control` has the budgets."""

from __future__ import annotations

import enum
from typing import NamedTuple

import msgspec

from kvloom.errors import KvloomError
from kvloom.limits_state import LimitsState


class LeaseKind(enum.Enum):
    REQUESTS = "requests_per_minute"
    TOKENS = "tokens_per_minute"
    SLOTS = "max_concurrent_requests"
    DAY_TOKENS = "tokens_per_day"
    MONTH_NANOS = "monthly_budget_nanos"

    @property
    def is_budget(self) -> bool:
        return self in (LeaseKind.DAY_TOKENS, LeaseKind.MONTH_NANOS)


class LeaseName(NamedTuple):
    account: str
    """"key:ID", "tenant:ORGANISATION/PROJECT" or "org:ORGANISATION"."""
    kind: LeaseKind
    period: str = ""
    """A budget's day ("2026-11-25") or month ("2026-11"), in UTC."""


class LeaseWant(msgspec.Struct, frozen=True):
    """Amounts are requests, weighted tokens, slots or billionths of the currency, by the kind."""

    name: LeaseName
    limit: int
    wanted: int = 0
    returned: int = 0
    """Unused units that the router gives back."""
    debt: int = 0
    """Units that the router has used beyond its lease. Only of rates."""
    held: int = 0
    """The part of its lease that the router keeps."""
    asked_at: float = 0.0
    number: int = 0
    """Numbers the questions about budgets: it tells one that is repeated, because there was no answer, from a new
    one."""


class LeaseGrant(msgspec.Struct, frozen=True):
    name: LeaseName
    granted: int
    remaining: int
    """The part that is left for all routers after this grant. Of rates it may be negative."""
    limit: int = 0
    """A budget's limit, as its owner knows it; 0: there is none any more."""
    asked_at: float = 0.0
    """From the want."""
    number: int = 0
    """From the want."""


class LimitCount(NamedTuple):
    """Records what a limit did to a request, or would have done if it were not in shadow mode."""

    kind: str
    """A field of Limits, or "all"."""
    outcome: str
    """"held", "refused", "capped", "would_refuse" or "would_cap"."""
    account: str = ""
    """The account whose limit it is; "" for "all"."""


class SideCallDecided(msgspec.Struct, frozen=True):
    """A call without an answer may go on, or is refused."""

    call_id: int
    error: KvloomError | None = None
    limits: LimitsState | None = None
    """None: it has no limits."""
