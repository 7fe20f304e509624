"""The results of checks of a running fabric, and how commands show them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

Outcome = Literal["ok", "warning", "unknown", "failed"]
_SIGNS: Final = {"ok": "✓", "warning": "!", "unknown": "?", "failed": "✗"}


class DoctorFinding(msgspec.Struct, frozen=True):
    """The result of one check. The detail of one that is not ok says what to do."""

    name: str
    outcome: Outcome
    detail: str


def show(findings: Sequence[DoctorFinding], *, as_json: bool) -> None:
    """Print them, and exit with 1 if a check has failed or cannot tell."""
    if as_json:
        print(msgspec.json.encode(findings).decode())
    else:
        for finding in findings:
            print(f"{_SIGNS[finding.outcome]} {finding.name}: {finding.detail}")
    if any(finding.outcome in ("failed", "unknown") for finding in findings):
        sys.exit(1)
