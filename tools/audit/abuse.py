"""Counts findings by tenant, user and rule, and compares the last day with the week before it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final, NamedTuple

from kvloom_common.audit.log import AuditRecord

DAY_SECONDS: Final = 86_400.0
WEEK_DAYS: Final = 7


class AbuseRow(NamedTuple):
    tenant: str
    safety_identifier: str
    rule: str
    num_last_day: int
    per_day_before: float
    """The mean of the seven days before."""


def abuse_rows(records: Iterable[AuditRecord], now: float) -> list[AbuseRow]:
    """The rows, those with the most findings of the last day first. Decisions that were reversed count, too."""
    last: Counter[tuple[str, str, str]] = Counter()
    earlier: Counter[tuple[str, str, str]] = Counter()
    for record in records:
        age_days = (now - record.at) / DAY_SECONDS
        if record.event in ("blocked", "flagged") and age_days < 1 + WEEK_DAYS:
            subject = record.tenant, record.safety_identifier, record.rule
            (last if age_days < 1 else earlier)[subject] += 1
    rows = [AbuseRow(*subject, last[subject], earlier[subject] / WEEK_DAYS) for subject in last | earlier]
    return sorted(rows, key=lambda row: (-row.num_last_day, row))
