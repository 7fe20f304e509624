"""The tenants of a run, with their keys and limits."""

from __future__ import annotations

import dataclasses
import time
from typing import Final

PROMPT_NANOS: Final = 1_000
"""For a token of a prompt, cached or not, so that what a client has received has one price."""
OUTPUT_NANOS: Final = 3_000
AMPLE_NANOS: Final = 10**12
"""A budget that no run uses up."""
FIRST_SCARCE_NANOS: Final = 4_000_000
"""A budget of some dozens of answers."""
MORE_SCARCE_NANOS: Final = 2_000_000
"""The operator adds so much to a scarce budget now and then."""
REQUESTS_PER_MINUTE: Final = (60, 120)
"""The two limits between which the operator changes."""


@dataclasses.dataclass(slots=True)
class IssuedKey:
    """Times are those of the monotonic clock."""

    id: str
    secret: str
    issued_at: float
    revoked_at: float | None = None
    """When the operator was told that it is revoked."""


@dataclasses.dataclass(slots=True)
class ChaosTenant:
    id: str
    """ORGANISATION/PROJECT"""
    limits: dict[str, int]
    """The limits as they are now, by their names in Limits."""
    largest_budget_nanos: int
    """The largest that it has had."""
    keys: list[IssuedKey] = dataclasses.field(default_factory=list)
    """The first is never revoked. The last is the one that users over HTTP have now."""

    @property
    def lasting_key(self) -> IssuedKey:
        return self.keys[0]

    @property
    def current_key(self) -> IssuedKey:
        return self.keys[-1]

    @property
    def is_scarce(self) -> bool:
        """True when its budget is used up now and then."""
        return self.largest_budget_nanos < AMPLE_NANOS

    @property
    def refusal_codes(self) -> frozenset[str]:
        """The errors that its limits explain."""
        codes = {"rate_limit_exceeded"} if "requests_per_minute" in self.limits else set()
        return frozenset(codes | ({"insufficient_quota"} if self.is_scarce else set()))

    def add_key(self, key_id: str, secret: str) -> None:
        self.keys.append(IssuedKey(key_id, secret, time.monotonic()))


def make_tenants(count: int) -> list[ChaosTenant]:
    """Every third has a limit of requests, and every third a budget that is used up."""
    tenants: list[ChaosTenant] = []
    for number in range(count):
        budget = FIRST_SCARCE_NANOS if number % 3 == 2 else AMPLE_NANOS
        limits = {"monthly_budget_nanos": budget}
        if number % 3 == 1:
            limits["requests_per_minute"] = REQUESTS_PER_MINUTE[-1]
        tenants.append(ChaosTenant(f"chaos-{number}/app", limits, budget))
    return tenants
