"""What a checker raises."""

from __future__ import annotations


class Violation(AssertionError):  # noqa: N818  (it is a finding, not a fault of this program)
    """An invariant was broken."""

    def __init__(self, invariant: str, detail: str) -> None:
        super().__init__(f"{invariant}: {detail}")
        self.invariant = invariant
        self.detail = detail
