"""What a checker raises."""

from __future__ import annotations


class Violation(AssertionError):
    """An invariant was broken."""

    def __init__(self, invariant: str, detail: str) -> None:
        super().__init__(f"{invariant}: {detail}")
        self.invariant = invariant
        self.detail = detail
