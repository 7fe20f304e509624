"""Notices when TensorRT-LLM stops to report its statistics or KV events while it works.

Fetching statistics raises when the library's connection to its executor fails; the getter of KV events swallows every
exception in 1.2.1 and returns nothing. What is missing can therefore only be seen by what must have been reported.
"""

from __future__ import annotations

from typing import Final

MIN_DUE: Final = 64
"""Fewer due records may be on their way, or were not made because others had the same content."""


class Reports:
    """One kind of reports. They are lost once fetching fails repeatedly, or once many (`MIN_DUE` and twice the batch)
    are due since the last one and `timeout_seconds` have passed. Pure; times in seconds of one clock."""

    def __init__(self, name: str, max_batch: int, timeout_seconds: float) -> None:
        self.name = name
        self.is_lost = False
        self._min_due = max(MIN_DUE, 2 * max_batch)
        self._timeout_seconds = timeout_seconds
        self._num_due = 0
        self._due_since = 0.0

    def on_due(self, now: float) -> None:
        """The engine has done something that it reports."""
        if not self._num_due:
            self._due_since = now
        self._num_due += 1

    def on_records(self) -> bool:
        """Records have arrived; returns whether they had been lost."""
        was_lost, self.is_lost = self.is_lost, False
        self._num_due = 0
        return was_lost

    def on_failure(self) -> bool:
        """Fetching has failed repeatedly; returns whether they are lost only now."""
        was_lost, self.is_lost = self.is_lost, True
        return not was_lost

    def check(self, now: float) -> bool:
        """Returns True when they have become lost, because of silence, since the last call."""
        if self.is_lost or self._num_due < self._min_due or now - self._due_since < self._timeout_seconds:
            return False
        self.is_lost = True
        return True
