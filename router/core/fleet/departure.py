"""The plan by which a shard with notice is emptied in time: which of its requests will have ended, and in which order
and at what pace the others move. Pure: time and speeds are arguments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

MARGIN_SHARE: Final = 0.3
"""Share of the notice that is kept free, for what takes longer than it should."""
FINISH_SLACK: Final = 1.25
"""An answer counts as ending in time if it would even if each of its steps took this many times as long."""
SAME_DEADLINE_SECONDS: Final = 0.25
"""A deadline that is reported again has moved by less than this: reports take different times to arrive."""


class Departure(msgspec.Struct):
    """When a shard has to be empty, and how far that is."""

    ends_at: float
    move_by: float
    """When the last request has to have moved."""
    next_move_at: float

    @staticmethod
    def within(seconds: float, now: float) -> Departure:
        return Departure(now + seconds, now + seconds * (1.0 - MARGIN_SHARE), now)

    def is_at(self, ends_at: float) -> bool:
        """True when a report that names this deadline says nothing new."""
        return abs(self.ends_at - ends_at) < SAME_DEADLINE_SECONDS

    def seconds_until_next(self, moved_seconds: float, total_seconds: float, now: float) -> float:
        """After the move of a request whose prefill elsewhere takes `moved_seconds`, of `total_seconds` that were left:
        the part of the remaining time that this is. So targets get the prefills one after another, not all at once."""
        return max(0.0, self.move_by - now) * moved_seconds / total_seconds


class RunningWork(msgspec.Struct, frozen=True):
    """Says what is left of one request on its shard, and what leaving costs."""

    request_id: str
    has_started: bool
    num_remaining_tokens: int
    """The most that any of its sequences may still produce."""
    num_context_tokens: int
    """Those that another shard has to compute again."""
    prefill_seconds: float
    """How long that takes."""


def ends_in_time(work: RunningWork, step_seconds: float, seconds: float) -> bool:
    """True when the request will have ended after `seconds`. `step_seconds`: 0 if it is not known; then it will not."""
    if not work.has_started or step_seconds <= 0:
        return False
    return FINISH_SLACK * work.num_remaining_tokens * step_seconds <= seconds


def in_order_of_leaving(works: Iterable[RunningWork], step_seconds: float, seconds: float) -> list[RunningWork]:
    """The requests that have to leave, since they will not have ended after `seconds`: first those that have not
    started, which lose nothing by it, then those that would run longest, and of these the dearest to compute again. So
    if the time turns out to be shorter, what is left is likely to end by itself, or cheap to lose."""
    leaving = [work for work in works if not ends_in_time(work, step_seconds, seconds)]
    return sorted(leaving, key=lambda work: (work.has_started, -work.num_remaining_tokens, -work.num_context_tokens))
