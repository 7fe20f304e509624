"""Notices that the shards of a model have nothing to do any more. It is pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

POLL_SECONDS: Final = 0.1
NUM_IDLE_POLLS: Final = 3
"""So often in a row the shards must have nothing to do: routers may be about to send what waited there."""


class ShardWork(NamedTuple):
    num_sequences: int
    num_submitted: int
    """The sequences that it has accepted since it started. Short ones may come and go between two polls."""


class IdleWatch:
    """Poll every POLL_SECONDS until `is_over`."""

    def __init__(self) -> None:
        self._submitted: list[int] = []
        self._num_idle = 0

    def take(self, works: Sequence[ShardWork | None]) -> None:
        """Takes the answers of the shards. None: one has not answered, since it hangs or is being restarted, so that it
        may have work, or does not know yet that the model is to end."""
        known = [work for work in works if work is not None]
        submitted = [work.num_submitted for work in known]
        is_idle = len(known) == len(works) and not any(work.num_sequences for work in known)
        self._num_idle = self._num_idle + 1 if is_idle and (submitted == self._submitted or not self._num_idle) else 0
        self._submitted = submitted

    @property
    def is_over(self) -> bool:
        return self._num_idle >= NUM_IDLE_POLLS
